"""Checks quantised products whose weights or rows our kernels prepare for torch's library, with all tensors on the GPU.

The kernels' own checks leave torch on the CPU, where other code multiplies.
"""

from __future__ import annotations

from functools import partial

import torch

from penstock.tools.gpu.cases.products import quantized, rounded
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.results import Results

SHAPES = ((2064, 4096, 300), (4096, 1096, 2048))
"""Outputs, inputs and rows."""


def check_library_products(
    results: Results, context: DeviceContext, shapes: tuple[tuple[int, int, int], ...] = SHAPES
) -> None:
    """Check `torch._int_mm` and `torch._scaled_mm` with rounded rows, and 16-bit products with widened weights."""
    for name, dtype in quantized.DTYPES.items():
        for form in rounded.FORMS:
            work = partial(_check_rounded, results, context, f"library.rounded.{name}.{form}", form, dtype, shapes)
            results.attempt(f"library.rounded.{name}.{form}", work)
        for form in quantized.FORMS:
            work = partial(_check_widened, results, context, f"library.widened.{name}.{form}", form, dtype)
            results.attempt(f"library.widened.{name}.{form}", work)


def _check_rounded(
    results: Results,
    context: DeviceContext,
    name: str,
    form: str,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, int, int], ...],
) -> None:
    device = context.device
    errors = [
        rounded.check_rounded(device.launcher, case, device.compute_capability, device.torch_device)
        for outputs, inputs, num_rows in shapes
        for case in (
            quantized.LinearCase(form, outputs, inputs, num_rows, dtype, has_bias=True),
            quantized.LinearCase(form, outputs, inputs, num_rows, dtype, scale=0.5),
        )
    ]
    results.check(name, True, "largest error of a product as a share of the tolerance", max(errors))


def _check_widened(results: Results, context: DeviceContext, name: str, form: str, dtype: torch.dtype) -> None:
    device = context.device
    case = quantized.LinearCase(form, 72, 256, 65, dtype, has_bias=True, scale=2.0)
    error = quantized.check_widened(device.launcher, case, device.torch_device)
    results.check(name, True, "largest error of a product as a share of the tolerance", error)
