"""Times torch's products of each weight of a model by number of rows, and names the library's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.tools.gpu_check.model_configs import LLAMA_8B, weight_shapes

if TYPE_CHECKING:
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.devices.profiling import Profiler
    from penstock.tools.gpu_check.reporting.results import Results


@dataclass(frozen=True)
class WeightSizes:
    """A Llama 8B's weights by default: outputs and inputs."""

    shapes: tuple[tuple[str, int, int], ...] = tuple(
        (name, outputs, inputs) for name, (outputs, inputs, _) in weight_shapes(LLAMA_8B).items()
    )
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    cold_bytes: int = 1 << 30
    """Total bytes of the copies of a weight that are read in turn."""


def measure(results: Results, context: DeviceContext, profiler: Profiler, sizes: WeightSizes) -> None:
    for shape in sizes.shapes:
        results.attempt(f"weights.{shape[0]}", partial(_measure_weight, results, context, profiler, sizes, *shape))


def _measure_weight(
    results: Results,
    context: DeviceContext,
    profiler: Profiler,
    sizes: WeightSizes,
    name: str,
    num_outputs: int,
    num_inputs: int,
) -> None:
    device, num_bytes = context.torch_device, 2 * num_outputs * num_inputs
    weights = [
        torch.empty(num_outputs, num_inputs, device=device, dtype=torch.bfloat16).normal_()
        for _ in range(max(1, -(-sizes.cold_bytes // num_bytes)))
    ]
    for num_rows in sizes.rows:
        if results.remaining_s <= 0:
            results.skipped(f"weights.{name}.{num_rows}", "no time was left")
            return
        x = torch.randn(num_rows, num_inputs, device=device).bfloat16()
        out = torch.empty(num_rows, num_outputs, device=device, dtype=torch.bfloat16)
        works = [partial(torch.mm, x, weight.t(), out=out) for weight in weights]
        us = context.clock.work_us(works)
        kernels = ", ".join(dict.fromkeys(run.name for run in profiler.runs(works[0])))
        flop = 2 * num_rows * num_outputs * num_inputs
        detail = f"{num_bytes / us / 1e6:.2f} TB/s of weights, {flop / us / 1e6:.0f} TFLOP/s; {kernels}"
        results.fact(f"weights.{name}.{num_rows}", us, "us", detail)
