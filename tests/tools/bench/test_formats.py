"""`penstock bench formats`: every format is loaded, in the kernels that it has, with a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.ggml import BLOCK_TYPES
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.quantized_weights import (
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
)
from penstock.backend.checkpoint.stacked_weights import decoded
from penstock.backend.checkpoint.weights import open_weights
from penstock.tools.bench.components import formats
from penstock.tools.bench.components.format_checkpoints import FORMATS, write_in_format
from penstock.tools.bench.components.formats import FormatFigures, worst_peak
from penstock.tools.bench.harness.load_profile import LoadProfile
from penstock.tools.random_model import write_random_model

if TYPE_CHECKING:
    from tests.tools.bench.conftest import BenchCommand

TINY = replace(formats.MODEL, hidden_size=256, layers=1, heads=4, kv_heads=1, intermediate_size=256, vocab_size=512)
TYPES: dict[str, type[Any]] = {
    **dict.fromkeys(("gptq", "awq", "w4a16", "gguf-Q4_0"), Int4Weight),
    "w8a8": Int8Weight,
    "mxfp4": Mxfp4Weight,
    "gguf-MXFP4": Mxfp4Weight,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats") / "plain"
    write_random_model(path, TINY)
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_as_finite_numbers_in_its_kernels_form(name: str, plain: Path, tmp_path: Path) -> None:
    write_in_format(plain, name, tmp_path / "model")
    with open_weights(tmp_path / "model", read_decoder_config(tmp_path / "model"), keeps=has_cpu_kernels) as weights:
        down = weights.layer(0, torch.float32).down
    found = down if down is None or isinstance(down, torch.Tensor) else decoded(down)
    block_type = BLOCK_TYPES.get(name.removeprefix("gguf-"))
    assert isinstance(found, TYPES.get(name, GroupedWeight if block_type and block_type.form else torch.Tensor))
    assert found is not None
    numbers = found if isinstance(found, torch.Tensor) else found.dequantize()
    assert numbers.isfinite().all()
    assert 0 < numbers.std() < 1


def test_figures_name_the_kernels_and_count_memory_and_tokens(
    bench: BenchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MODEL", TINY)
    run = bench("formats", "--formats", "gptq", "--rows", "1,2", "--steps", "1")
    assert run.status == 0, run.errors
    (row,) = run.report["sections"]["formats"]
    assert row["format"] == "gptq"
    profile = row["profile"]
    assert profile["kernels"] == ["4 bits, groups of 128"]
    assert 256 * 512 * 2 < profile["weight_bytes"] < 600_000
    assert list(profile["tokens_per_s"]) == ["1", "2"]
    assert min(profile["load_s"], *profile["tokens_per_s"].values()) > 0


def test_unknown_format_is_refused_with_the_known_ones(bench: BenchCommand) -> None:
    run = bench("formats", "--formats", "gptq,exl3")
    assert run.status == 1
    assert '"exl3" is no format; choose from bf16, gptq' in run.errors


def test_aim_is_for_the_largest_peak() -> None:
    found = [
        FormatFigures(name, 1, LoadProfile(["int4"], 100, peak, peak, 1.0, {1: 1.0}))
        for name, peak in (("awq", 110), ("gptq", 120))
    ]
    aim = worst_peak(found)
    assert (aim.value, aim.reached) == (1.2, False)
    assert aim.name.endswith("gptq")
