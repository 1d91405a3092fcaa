"""`penstock bench quantization`: its figures for the demo model, in short."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.gguf import kept_directories
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.checkpoint.quantization import kept_file
from penstock.backend.passes.decoder.held_weights import packed_file
from penstock.backend.start.shipped_models import DEMO_MODEL_DIR
from penstock.tools.bench.components import quantization
from penstock.tools.bench.components.quantization import QuantizationOptions, read_windows
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary, from_model
from tests.checkpoints import load_oracle, make_model
from tests.tools.bench.conftest import BenchCommand

SHORT = ("--windows", "4", "--window-tokens", "24", "--greedy-tokens", "6")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kept_directories, kept_file, packed_file):
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
    assert exact["divergence"] == exact["max_logit_error"] == 0
    assert (exact["same_likeliest"], exact["greedy_equal"], exact["greedy_first_difference"]) == (1, 1, 6)
    divergences = [row["divergence"] for row in rows.values()]
    assert 0 < rows["bf16"]["divergence"] < rows["int4"]["divergence"]
    assert 0 < rows["int8"]["divergence"] < rows["int4"]["divergence"] < rows["int4-128"]["divergence"] < 1
    assert max(divergences) == divergences[-1]
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
    assert rows["stored"]["divergence"] > 0


def test_comparison_with_known_logits(tmp_path: Path, text: Path) -> None:
    """One position of three differs in its likeliest token."""
    options = QuantizationOptions(text=text, windows=1, window_tokens=3, greedy_tokens=4)
    measurement = quantization.Measurement(options, DEMO_MODEL_DIR, tmp_path / "logits")
    vocabulary = 4096
    reference = np.zeros((3, 1, vocabulary), np.float32)
    reference[:, 0, 7] = 2
    other = reference.copy()
    other[2, 0, 9] = 3
    measurement._reference = reference
    measurement._greedy = np.array([[1, 2, 3, 4]], np.int32)
    found = measurement._compare("int8", 10, iter(other), np.array([[1, 2, 9, 4]], np.int32))
    total, larger = vocabulary - 1 + math.exp(2), vocabulary - 2 + math.exp(2) + math.exp(3)
    # The distributions differ in one number: p = e^x / total.
    divergence = math.log(larger / total) - 3 / total
    assert found.divergence == pytest.approx(divergence / 3)
    assert found.max_logit_error == 3
    assert found.mean_logit_error == pytest.approx(3 / vocabulary / 3)
    assert found.same_likeliest == pytest.approx(2 / 3)
    assert (found.greedy_equal, found.greedy_first_difference) == (0.75, 2)
    target = int(measurement._windows[0, 2])
    assert found.perplexity == pytest.approx(total / math.exp(2 if target == 7 else 0))


def test_text_that_is_too_short_is_refused(bench: BenchCommand, text: Path) -> None:
    run = bench("quantization", "--text", str(text), "--windows", "4000")
    assert run.status == 1
    assert "4000 windows of 256 need 1024000: lower --windows, or give a longer --text" in run.errors
