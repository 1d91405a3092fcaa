"""The section "unsplit": products of the library that sums along no part of their inputs, with the bits of one row.

It runs alone in its process, because the library reads its environment once. Its times stand beside `weights.*`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.tools.gpu.devices.device_context import DeviceContext, open_device_context
from penstock.tools.gpu.results import Results
from penstock.tools.random_weights import LLAMA_8B, weight_shapes

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""vLLM's settings for sm_90: cuBLAS splits no product along its inner dimension, whatever workspace it has."""


@dataclass(frozen=True)
class UnsplitSizes:
    shapes: dict[str, tuple[int, int, int]]
    compared_rows: tuple[int, ...] = (2, 7, 8, 16, 17, 33, 64, 128, 256, 512, 2048)
    timed_rows: tuple[int, ...] = (1, 64, 256)
    cold_bytes: int = 192 << 20
    dtype: torch.dtype = torch.bfloat16


def run(results: Results) -> None:
    os.environ.update(_ENVIRONMENT)
    context = open_device_context()
    forbid_splits()
    measure(results, context, UnsplitSizes(weight_shapes(LLAMA_8B)))


def forbid_splits() -> None:
    """Forbid split sums in torch's products. Call it after `CudaDevice` is made, which sets one of these options."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul: Any = torch.backends.cuda.matmul
    try:
        # No sums in 16 bits and no split sums; needs torch 2.10.
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    except (TypeError, RuntimeError):
        matmul.allow_bf16_reduced_precision_reduction = False


@torch.inference_mode()
def measure(results: Results, context: DeviceContext, sizes: UnsplitSizes) -> None:
    for name, (outputs, inputs, _) in sizes.shapes.items():
        results.attempt(f"unsplit.{name}", partial(_measure, results, context, sizes, name, outputs, inputs))


def _measure(
    results: Results, context: DeviceContext, sizes: UnsplitSizes, name: str, outputs: int, inputs: int
) -> None:
    """Check at every number of rows that no row's bits differ from those it has alone; then time some."""
    count = max(1, sizes.cold_bytes // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs, device=context.torch_device, dtype=sizes.dtype) for _ in range(count)]
    x = torch.randn(max(sizes.compared_rows), inputs, device=context.torch_device, dtype=sizes.dtype)
    compared = sorted({0, *(rows - 1 for rows in sizes.compared_rows)})
    alone = {row: torch.mm(x[row : row + 1], weights[0].t())[0] for row in compared}
    differing = []
    for rows in sizes.compared_rows:
        together = torch.mm(x[:rows], weights[0].t())
        if not all(torch.equal(together[row], alone[row]) for row in compared if row < rows):
            differing.append(rows)
    shown = (
        f"differs from one row at {', '.join(map(str, differing))} rows" if differing else "same bits as with one row"
    )
    results.check(f"unsplit.{name}", not differing, shown)
    for rows in sizes.timed_rows:
        out = torch.empty(rows, outputs, device=context.torch_device, dtype=sizes.dtype)
        us = context.clock.work_us([partial(torch.mm, x[:rows], weight.t(), out=out) for weight in weights])
        results.fact(f"unsplit.{name}.{rows}", us, "us", f"{outputs * inputs * 2 / us / 1e6:.2f} TB/s of weights")
