"""Cases of a layer's products, with cold weights: our fused kernels of few rows, and the library's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.ops.matmul import CudaLinear
from penstock.backend.passes.cuda.ops.row_products import CLAIMING_BLOCKS, ROW_DTYPE, RowProducts
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.speed.kernel_cases import PAGE_TOKENS, KernelCase, KernelSizes, PreparedCase


def row_product_cases(sizes: KernelSizes) -> list[KernelCase]:
    """Return product.bf16.<weight>.<rows> for a layer's four products, and weights.* for the library's."""
    prepare = {"qkv": _qkv, "o": _o, "gate_up": _gate_up, "down": _down}
    cases = [
        KernelCase(f"product.bf16.{name}.{num_rows}", partial(make, sizes, num_rows))
        for name, make in prepare.items()
        for num_rows in sizes.fused_rows
    ]
    shapes = {
        "qkv": (sizes.heads.qkv_size, sizes.hidden),
        "o": (sizes.hidden, sizes.heads.output_size),
        "gate_up": (2 * sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
        "lm_head": (sizes.vocab_size, sizes.hidden),
    }
    return cases + [
        KernelCase(f"weights.{name}.{num_rows}", partial(_library, sizes, *shape, num_rows))
        for name, shape in shapes.items()
        for num_rows in sizes.library_rows
    ]


def _library(sizes: KernelSizes, outputs: int, inputs: int, num_rows: int, context: DeviceContext) -> PreparedCase:
    linears = _linears(sizes, outputs, inputs, context.torch_device)
    x = torch.randn(num_rows, inputs, device=context.torch_device).to(ROW_DTYPE)
    out = torch.empty(num_rows, outputs, device=context.torch_device, dtype=ROW_DTYPE)
    return _case(linears, lambda linear: torch.mm(x, linear.transposed, out=out))


def _qkv(sizes: KernelSizes, num_rows: int, context: DeviceContext) -> PreparedCase:
    heads, device = sizes.heads, context.torch_device
    layout, products = _layout(sizes, num_rows), _products(sizes, num_rows, context)
    linears = _linears(sizes, heads.qkv_size, sizes.hidden, device)
    rows = products.weigh(*_residual(sizes, num_rows, device))
    qkv = torch.empty(num_rows, heads.qkv_size, device=device, dtype=ROW_DTYPE)
    cache = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    starts, slots = (torch.arange(n, dtype=torch.int32, device=device) for n in (num_rows + 1, num_rows))
    step = RowArrays(starts, torch.zeros_like(slots), slots)
    rope = torch.rand(PAGE_TOKENS, heads.head_dim, device=device)
    return _case(
        linears, lambda linear: products.store(rows, linear, qkv, cache, slots[:, None], step, rope, None, None)
    )


def _o(sizes: KernelSizes, num_rows: int, context: DeviceContext) -> PreparedCase:
    return _add(sizes, sizes.heads.output_size, num_rows, context)


def _down(sizes: KernelSizes, num_rows: int, context: DeviceContext) -> PreparedCase:
    return _add(sizes, sizes.intermediate, num_rows, context)


def _add(sizes: KernelSizes, num_inputs: int, num_rows: int, context: DeviceContext) -> PreparedCase:
    products, device = _products(sizes, num_rows, context), context.torch_device
    linears = _linears(sizes, sizes.hidden, num_inputs, device)
    x = torch.randn(num_rows, num_inputs, device=device).to(ROW_DTYPE)
    residual, norm, hidden = _residual(sizes, num_rows, device)
    return _case(linears, lambda linear: products.add(x, linear, residual, norm, hidden))


def _gate_up(sizes: KernelSizes, num_rows: int, context: DeviceContext) -> PreparedCase:
    products, device = _products(sizes, num_rows, context), context.torch_device
    linears = _linears(sizes, 2 * sizes.intermediate, sizes.hidden, device)
    rows = products.weigh(*_residual(sizes, num_rows, device))
    out = torch.empty(num_rows, sizes.intermediate, device=device, dtype=ROW_DTYPE)
    return _case(linears, lambda linear: products.gate(rows, linear, out))


def _layout(sizes: KernelSizes, num_rows: int) -> CacheLayout:
    return CacheLayout(1, num_rows, PAGE_TOKENS, sizes.heads.num_kv_heads, sizes.heads.head_dim, "bf16")


def _products(sizes: KernelSizes, num_rows: int, context: DeviceContext) -> RowProducts:
    made = RowProducts(
        context.device.launcher, context.torch_device, sizes.heads, sizes.hidden, sizes.heads.head_dim, 1e-5,
        _layout(sizes, num_rows), CLAIMING_BLOCKS * context.device.num_sms * context.choices.claimed_products,
    )  # fmt: skip
    context.device.launcher.prepare(made.kernels([None]))
    return made


def _residual(sizes: KernelSizes, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a residual stream, a norm's weight, and memory for their product."""
    residual = torch.randn(num_rows, sizes.hidden, device=device)
    return residual, torch.ones(sizes.hidden, device=device), torch.empty_like(residual, dtype=ROW_DTYPE)


def _linears(sizes: KernelSizes, outputs: int, inputs: int, device: torch.device) -> list[CudaLinear]:
    """Weights that together exceed the cache."""
    count = max(1, -(-sizes.cold_bytes // (2 * outputs * inputs)))
    weights = [
        torch.empty(outputs, inputs, device=device, dtype=ROW_DTYPE).normal_(std=inputs**-0.5) for _ in range(count)
    ]
    return [CudaLinear(weight, weight.t(), None) for weight in weights]


def _case(linears: list[CudaLinear], multiply: Callable[[CudaLinear], object]) -> PreparedCase:
    """Counts the weights' bytes."""
    num_bytes = linears[0].weight.nbytes
    return PreparedCase([partial(multiply, linear) for linear in linears], num_bytes, "TB/s", leads_with_time=True)
