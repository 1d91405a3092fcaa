"""The items invariance.*, on the emulated device with a tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu.checks import invariance
from penstock.tools.random_weights import LLAMA_8B, QWEN3_06B, TINY, weight_shapes
from tests.tools.gpu.device_context import Record, make_device_context


def test_deterministic_passes_keep_a_rows_bits(record: Record) -> None:
    context, batch_cases = make_device_context(), invariance.BATCH_CASES
    small = tuple(
        replace(batch_case, num_rows=min(batch_case.num_rows, 9), row=batch_case.row % 9) for batch_case in batch_cases
    )
    invariance.check_products(record.results, context, {"o": (64, 32, 2)}, torch.float32)
    sizes = invariance.PassSizes(TINY, torch.float32, ("bf16", "q8_0"), small, new_tokens=4)
    invariance.check_passes(record.results, context, sizes)
    found = record.findings()
    assert found["invariance.blocks.o"].passed
    assert found["invariance.whole.o"].unit == "of 13 numbers of rows"
    for kv_dtype in ("bf16", "q8_0"):
        for name in ("few", "blocks", "chunks", "tokens", "beside_decodes"):
            finding = found[f"invariance.deterministic.{kv_dtype}.{name}"]
            assert finding.detail == "4 of 4 tokens have the same logits as in a batch of one"
        assert found[f"invariance.deterministic.{kv_dtype}.recomputed"].passed


def test_pass_whose_bits_depend_on_the_batch_fails(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a pass without `--deterministic`."""
    monkeypatch.setattr(invariance, "StepSizes", lambda *sizes, **_: StepSizes(*sizes))
    batch_cases = (invariance.BatchCase("tokens", 3, 1, 1, 1),)
    sizes = invariance.PassSizes(TINY, torch.float32, ("bf16",), batch_cases, new_tokens=2)
    invariance.check_passes(record.results, make_device_context(), sizes)
    with pytest.raises(AssertionError, match=r"bf16\.tokens', '0 of 2 tokens.*bf16\.recomputed"):
        record.findings()


def test_large_models_have_their_published_sizes() -> None:
    shapes = weight_shapes(LLAMA_8B)
    num_weights = sum(outputs * inputs * count for outputs, inputs, count in shapes.values())
    assert num_weights + 128_256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert QWEN3_06B.num_heads * QWEN3_06B.head_dim == 2048
