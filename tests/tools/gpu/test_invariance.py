"""The section invariance, on the emulated device with a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from penstock.backend.passes.decoder.cuda.workspace_plan import StepSizes
from penstock.tools.gpu.checks import deterministic_passes, invariance, invariance_child
from penstock.tools.random_weights import LLAMA_8B, QWEN3_06B, TINY, weight_shapes
from tests.tools.gpu.device_context import Record, make_device_context


def test_deterministic_passes_keep_a_rows_bits(record: Record) -> None:
    context, batch_cases = make_device_context(), deterministic_passes.BATCH_CASES
    small = tuple(
        replace(batch_case, num_rows=min(batch_case.num_rows, 9), row=batch_case.row % 9) for batch_case in batch_cases
    )
    deterministic_passes.check_products(record.results, context, {"o": (64, 32, 2)}, torch.float32)
    sizes = deterministic_passes.PassSizes(TINY, torch.float32, ("bf16", "q8_0"), small, new_tokens=4)
    deterministic_passes.check_passes(record.results, context, sizes)
    found = record.findings()
    assert found["invariance.blocks.o"].passed
    for kv_dtype in ("bf16", "q8_0"):
        for name in ("few", "blocks", "chunks", "tokens", "beside_decodes"):
            finding = found[f"invariance.deterministic.{kv_dtype}.{name}"]
            assert finding.detail == "4 of 4 tokens have the same logits as in a batch of one"
        assert found[f"invariance.deterministic.{kv_dtype}.recomputed"].passed


def test_pass_whose_bits_depend_on_the_batch_fails(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a pass without `--deterministic`."""
    monkeypatch.setattr(deterministic_passes, "StepSizes", lambda *sizes, **_: StepSizes(*sizes))
    batch_cases = (deterministic_passes.BatchCase("tokens", 3, 1, 1, 1),)
    sizes = deterministic_passes.PassSizes(TINY, torch.float32, ("bf16",), batch_cases, new_tokens=2)
    deterministic_passes.check_passes(record.results, make_device_context(), sizes)
    with pytest.raises(AssertionError, match=r"bf16\.recomputed.*bf16\.tokens', '0 of 2 tokens"):
        record.findings()


def test_cost_of_deterministic_is_recorded_with_the_step_times(record: Record) -> None:
    sizes = deterministic_passes.CostSizes(TINY, torch.float32, (1, 3), context_tokens=40, prefill_tokens=48)
    deterministic_passes.measure_cost(record.results, make_device_context(), sizes)
    found = record.findings()
    for name in ("decode.1x40", "decode.3x40", "prefill.48"):
        assert "ms with --deterministic, " in found[f"invariance.deterministic.cost.{name}"].detail


def test_child_compares_rows_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = invariance_child.LibrarySizes(
        {"o": (64, 32, 2), "lm_head": (200, 32, 1)}, (2, 7), (1, 2), 10_000, TINY, torch.float32, 9, 4, (1, 3)
    )
    invariance_child.measure(make_device_context(), sizes, until_s=1e12)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(printed["differing"]) == {"o", "lm_head"}
    assert printed["step_us"]["2"] > 0
    assert printed["tokens"] == {"detail": "1 of 1 rows agree in batches of 1 and 3"}


def test_settings_are_compared_and_the_largest_cost_is_recorded(record: Record) -> None:
    script = """
import json, os
slow = 1.5 if "CUBLASLT_WORKSPACE_SIZE" in os.environ else 1
differing, step_us = {"qkv": [] if slow > 1 else [7]}, {"1": 10 * slow, "64": 20}
print(json.dumps({"differing": differing, "step_us": step_us, "tokens": {"detail": "x"}}))
"""
    invariance.compare_settings(record.results, [sys.executable, "-c", script])
    found = record.findings()
    assert found["invariance.cost"].value == pytest.approx(50)
    assert "7 rows" in str(found["invariance.default.product.qkv"].value)
    assert found["invariance.invariant.product.qkv"].passed
    assert (found["invariance.invariant.tokens"].value, found["invariance.invariant.tokens"].passed) == ("x", None)


def test_setting_whose_child_dies_is_a_failed_check(record: Record) -> None:
    invariance.compare_settings(record.results, [sys.executable, "-c", "raise SystemExit('no GPU')"])
    with pytest.raises(AssertionError, match="no GPU"):
        record.findings()


def test_large_models_have_their_published_sizes() -> None:
    shapes = weight_shapes(LLAMA_8B)
    num_weights = sum(outputs * inputs * count for outputs, inputs, count in shapes.values())
    assert num_weights + 128_256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert QWEN3_06B.num_heads * QWEN3_06B.head_dim == 2048
