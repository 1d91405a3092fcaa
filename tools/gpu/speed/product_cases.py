"""Cases of products with cold weights: our fused kernels of few rows, the library's, quantised ones and experts'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.ops.activations import Residual
from penstock.backend.passes.cuda.ops.expert_ops import CudaExpertOps
from penstock.backend.passes.cuda.ops.matmul import CudaLinear, WholeMatmul
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear, packed_bytes
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.cuda.ops.rounded_rows import ROUNDED_FORMS, RoundedProducts
from penstock.backend.passes.cuda.ops.row_products import CLAIMING_BLOCKS, ROW_DTYPE, RowProducts
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import ExpertWeights
from penstock.tools.gpu.cases.products.quantized import ALL_FORMS, random_weight
from penstock.tools.gpu.cases.products.rounded import MIN_ROUNDED_ROWS
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.speed.kernel_cases import PAGE_TOKENS, KernelSizes, PreparedCase, make_elementwise

_random_weight = lru_cache(maxsize=1)(random_weight)
"""Of one form: its items follow each other."""


def _shape(sizes: KernelSizes, weight: str) -> tuple[int, int]:
    """Outputs and inputs."""
    return {
        "qkv": (sizes.heads.qkv_size, sizes.hidden),
        "o": (sizes.hidden, sizes.heads.output_size),
        "gate_up": (2 * sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
        "lm_head": (sizes.vocab_size, sizes.hidden),
    }[weight]


def library(sizes: KernelSizes, context: DeviceContext, weight: str, rows: int) -> PreparedCase:
    outputs, inputs = _shape(sizes, weight)
    x, out = _random(context, rows, inputs), _zeros(context, rows, outputs)
    linears = _linears(sizes, context, weight)
    return _case(linears, linears[0].weight, rows, lambda linear: torch.mm(x, linear.transposed, out=out))


def fused(sizes: KernelSizes, context: DeviceContext, weight: str, rows: int) -> PreparedCase:
    """A layer's product with its edges, which a step of few rows has instead of the library's."""
    heads, device = sizes.heads, context.torch_device
    layout = CacheLayout(1, rows, PAGE_TOKENS, heads.num_kv_heads, heads.head_dim, "bf16")
    products = RowProducts(
        context.device.launcher, device, heads, sizes.hidden, heads.head_dim, 1e-5, layout,
        CLAIMING_BLOCKS * context.device.num_sms * context.choices.claimed_products,
    )  # fmt: skip
    context.device.launcher.prepare(products.kernels([None]))
    linears, residual = _linears(sizes, context, weight), torch.randn(rows, sizes.hidden, device=device)
    norm, hidden = torch.ones(sizes.hidden, device=device), _zeros(context, rows, sizes.hidden)
    x, out = (_random(context, rows, width) for width in reversed(_shape(sizes, weight)))
    cache = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    starts, slots = (torch.arange(n, dtype=torch.int32, device=device) for n in (rows + 1, rows))
    step, rope = RowArrays(starts, slots * 0, slots), torch.rand(PAGE_TOKENS, heads.head_dim, device=device)
    begun, gated = products.weigh(residual, norm, hidden), out[:, : sizes.intermediate].contiguous()
    multiply: dict[str, Callable[[CudaLinear], object]] = {
        "gate_up": lambda linear: products.gate(begun, linear, gated),
        "lm_head": lambda linear: products.multiply(x, linear, out),
        "qkv": lambda linear: products.store(begun, linear, out, cache, slots[:, None], step, rope, None, None),
    }
    add = multiply.get(weight, lambda linear: products.add(x, linear, residual, norm, hidden))
    return _case(linears, linears[0].weight, rows, add)


def quantised(sizes: KernelSizes, context: DeviceContext, form: str, rows: int) -> list[PreparedCase]:
    """The product of an MLP's gate and up: by our kernel, with weights that are widened, and with rows of 8 bits."""
    outputs, inputs = _shape(sizes, "gate_up")
    weight, launcher, device = _random_weight(outputs, inputs, ALL_FORMS[form]), context.device.launcher, context.device
    num_bytes = packed_bytes(weight.form, weight.shape, ROW_DTYPE)
    x, out = _random(context, rows, inputs), _zeros(context, rows, outputs)
    ways: dict[str, tuple[int, RoundedProducts | None]] = {"own": (rows, None), "widened": (rows - 1, None)}
    if weight.form in ROUNDED_FORMS and rows >= MIN_ROUNDED_ROWS:
        rounded = RoundedProducts(
            launcher, device.torch_device, ROW_DTYPE, rows, inputs, device.compute_capability, MIN_ROUNDED_ROWS
        )
        ways["rounded"] = rows, rounded
    cases: list[PreparedCase] = []
    linears: list[CudaQuantizedLinear] = []
    for way, (kernel_rows, with_rounded) in ways.items():
        products = QuantizedProducts(
            launcher, device.torch_device, ROW_DTYPE, rows, WholeMatmul(kernel_rows), with_rounded
        )
        count = 1 if linears else -(-sizes.cold_bytes // num_bytes)
        packed = [products.pack(weight, None) for _ in range(count)]
        linears = linears or packed
        launcher.prepare(products.kernels())
        works = [partial(products.multiply, x, linear, out) for linear in linears]
        cases.append(PreparedCase(list(works), num_bytes, 2.0 * rows * outputs * inputs, way))
    return cases


def experts(sizes: KernelSizes, context: DeviceContext, tokens: int) -> PreparedCase:
    """All of a layer's experts: routes, groups, products, sums. Counts the weights of experts that tokens chose."""
    of, hidden, device = sizes.experts, sizes.expert_hidden, context.torch_device
    launcher, matmul = context.device.launcher, WholeMatmul(grouped_rows=context.choices.grouped_rows)
    products = QuantizedProducts(launcher, device, ROW_DTYPE, tokens, matmul)
    activate = make_elementwise(sizes, context).silu_mul
    ops = CudaExpertOps(launcher, device, hidden, of, ROW_DTYPE, tokens, matmul, products, activate)
    launcher.prepare(ops.kernels)
    router, gate_up, down = (
        torch.empty(of.count * rows, inputs, device=device, dtype=ROW_DTYPE).normal_(std=1 / 32)
        for rows, inputs in ((1, hidden), (2 * of.width, hidden), (hidden, of.width))
    )
    packed = ops.pack(ExpertWeights(router, gate_up, down), 1.0)
    residual = Residual(torch.zeros(tokens, hidden, device=device))
    weights = 3 * of.width * hidden
    num_chosen = of.count * (1 - (1 - of.per_token / of.count) ** tokens)
    work = partial(ops.add, _random(context, tokens, hidden), packed, residual)
    return PreparedCase([work], 2.0 * num_chosen * weights, 2.0 * tokens * of.per_token * weights)


def _random(context: DeviceContext, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, device=context.torch_device).to(ROW_DTYPE)


def _zeros(context: DeviceContext, rows: int, width: int) -> Tensor:
    return torch.zeros(rows, width, device=context.torch_device, dtype=ROW_DTYPE)


def _linears(sizes: KernelSizes, context: DeviceContext, weight: str) -> list[CudaLinear]:
    """Weights that together exceed the cache."""
    outputs, inputs = _shape(sizes, weight)
    count = max(1, -(-sizes.cold_bytes // (2 * outputs * inputs)))
    weights = [
        torch.empty(outputs, inputs, device=context.torch_device, dtype=ROW_DTYPE).normal_(std=inputs**-0.5)
        for _ in range(count)
    ]
    return [CudaLinear(each, each.t(), None) for each in weights]


def _case(linears: Sequence[Any], weight: Tensor, rows: int, multiply: Callable[[Any], object]) -> PreparedCase:
    works: list[Callable[[], object]] = [partial(multiply, linear) for linear in linears]
    return PreparedCase(works, weight.nbytes, 2.0 * rows * weight.numel())
