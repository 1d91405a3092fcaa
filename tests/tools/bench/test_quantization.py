"""`penstock bench quantization`: its figures for tiny models, in short."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.passes.shared_weights import packed_file
from penstock.tools.bench.components.quantization import QuantizationOptions, read_windows
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary, from_model
from tests.checkpoints import load_oracle, make_model
from tests.tools.bench.conftest import BenchCommand

SHORT = ("--windows", "4", "--window-tokens", "24", "--rows", "1,2", "--steps", "1")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cached_directories, cached_file, packed_file):
        monkeypatch.setattr(module, "cache_directory", lambda: tmp_path / "cache")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Return a list of the words in the string, using sep as the delimiter string. " * 8)
    return path


def test_forms_are_compared_with_fp32(bench: BenchCommand, text: Path) -> None:
    run = bench("quantization", "--text", str(text), *SHORT)
    assert run.status == 0, run.errors
    rows = {row["form"]: row for row in run.report["sections"]["quantization"]}
    assert list(rows) == ["fp32", "bf16", "int8", "int4", "int4-128"]
    windows = torch.from_numpy(
        read_windows(QuantizationOptions(text=text, windows=4, window_tokens=24), DEMO_MODEL_DIR)
    )
    with torch.inference_mode():
        logits = load_oracle(DEMO_MODEL_DIR)(windows.long()).logits[:, 12:-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 13:].long().flatten())
    exact = rows["fp32"]
    assert exact["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert all(speed > 0 for row in rows.values() for speed in row["tokens_per_s"].values())
    assert [list(row["tokens_per_s"]) for row in rows.values()] == [["1", "2"]] * 5
    weights = [row["weight_bytes"] for row in rows.values()]
    assert weights == sorted(weights, reverse=True)
    assert all(0.5 < row["perplexity"] / exact["perplexity"] < 2 for row in rows.values())


def test_quantised_checkpoint_is_compared_with_its_own_numbers(bench: BenchCommand, text: Path, tmp_path: Path) -> None:
    model = make_model("llama2", hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=320)
    file = from_model("llama", model, lambda _: "Q4_0", byte_level_vocabulary(320))
    model.load_state_dict(file.exact, strict=False)
    path = file.write(tmp_path / "model.gguf")
    run = bench("quantization", "--model", str(path), "--text", str(text), *SHORT)
    assert run.status == 0, run.errors
    rows = {row["form"]: row for row in run.report["sections"]["quantization"]}
    assert list(rows) == ["fp32", "bf16", "stored", "int8", "int4"]  # 128 does not divide 64 inputs
    windows = read_windows(QuantizationOptions(text=text, windows=4, window_tokens=24), resolve_model(str(path)))
    with torch.inference_mode():
        logits = model(torch.from_numpy(windows).long()).logits[:, 12:-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(windows)[:, 13:].long().flatten())
    assert rows["fp32"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert rows["stored"]["weight_bytes"] < rows["bf16"]["weight_bytes"] < rows["fp32"]["weight_bytes"]


def test_text_that_is_too_short_is_refused(bench: BenchCommand, text: Path) -> None:
    run = bench("quantization", "--text", str(text), "--windows", "4000")
    assert run.status == 1
    assert "4000 windows of 256 need 1024000: lower --windows, or give a longer --text" in run.errors
