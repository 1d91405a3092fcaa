"""Times decode steps of few rows with our fused products and with the library's, and chooses which rows ours take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda.workspace_plan import StepSizes, make_layout
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.devices.random_caches import fill_cache
from penstock.tools.gpu_check.devices.steps import Steps, step_us
from penstock.tools.gpu_check.model_configs import LLAMA_8B, QWEN3_06B

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.reporting.results import Results

WAYS = {"ours": 32, "library": 0}
_PAGE_TOKENS = 32
_MOST_LOSS = 0.02
"""Ours stay if they are slower by at most this: less may be noise."""


@dataclass(frozen=True)
class RowPlan:
    name: str
    setting: str
    """The setting that the model chooses."""
    config: DecoderConfig
    rows: tuple[int, ...] = (1, 4, 8, 16, 32)
    tokens: int = 1024
    num_steps: int = 9
    dtype: torch.dtype = torch.bfloat16


PLANS = (
    # A quarter of the layers and of the vocabulary, so that all parts keep their shares.
    RowPlan(
        "llama8b",
        "product_rows",
        replace(LLAMA_8B, num_layers=LLAMA_8B.num_layers // 4, vocab_size=LLAMA_8B.vocab_size // 4),
    ),
    RowPlan("qwen06b", "small_product_rows", QWEN3_06B),
)


def measure(results: Results, context: DeviceContext, plan: RowPlan) -> None:
    """Record the times of both ways by rows, and the choice that follows."""
    weights = RandomWeights(plan.config, plan.dtype, context.torch_device)
    times = {way: _times_us(context, plan, weights, most_rows) for way, most_rows in WAYS.items()}
    for num_rows in plan.rows:
        for way, us in times.items():
            results.fact(f"variant.{plan.setting}.{plan.name}.{num_rows}x{plan.tokens}.{way}", us[num_rows], "us")
    record_most_rows(results, plan.setting, times["ours"], times["library"])


def record_most_rows(
    results: Results, setting: str, ours_us: Mapping[int, float], library_us: Mapping[int, float]
) -> None:
    """Record up to how many rows our products are not slower; 0 if they already are with the fewest."""
    chosen = 0
    for num_rows in sorted(ours_us):
        if ours_us[num_rows] > (1 + _MOST_LOSS) * library_us[num_rows]:
            break
        chosen = num_rows
    shown = ", ".join(f"{rows}: {100 * (us / library_us[rows] - 1):+.1f} %" for rows, us in ours_us.items())
    results.fact(f"variant.{setting}", chosen, "", f"time of ours against the library's by rows: {shown}")


def _times_us(context: DeviceContext, plan: RowPlan, weights: RandomWeights, most_rows: int) -> dict[int, float]:
    """Device time of a captured decode step by rows."""
    pages_per_row = -(-(plan.tokens + plan.num_steps) // _PAGE_TOKENS)
    choices = replace(context.choices, product_rows=most_rows, small_product_rows=most_rows, mixed_tokens=0)
    most, longest = max(plan.rows), pages_per_row * _PAGE_TOKENS
    forward_pass = CudaDecoderPass(
        plan.config, weights, context.device, plan.dtype, StepSizes(most, most, longest, choices=choices)
    )
    try:
        num_pages = most * pages_per_row
        forward_pass.create_cache(num_pages, _PAGE_TOKENS, "bf16")
        fill_cache(forward_pass._ops.cache.view(-1), make_layout(plan.config, num_pages, _PAGE_TOKENS, "bf16"))
        return {num_rows: _step_us(context, plan, forward_pass, num_rows, pages_per_row) for num_rows in plan.rows}
    finally:
        forward_pass.close()


def _step_us(
    context: DeviceContext, plan: RowPlan, forward_pass: CudaDecoderPass, num_rows: int, pages_per_row: int
) -> float:
    """Median over steps; the first, which gives rows their slots, does not count."""
    steps = Steps(num_rows, pages_per_row)
    steps.context_lens[:] = plan.tokens - 1
    one_us = partial(step_us, context.clock, forward_pass)
    return median([one_us(steps.decode()) for _ in range(plan.num_steps)][1:])
