"""Products of few rows with the edges of a layer, checked against float64 and against the kernels that they replace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.ops.matmul import CudaLinear
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear, pack_weight
from penstock.backend.passes.cuda.ops.row_products import ROW_DTYPE, RowLinear, RowProducts, WeighedRows
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.cases.check import require, require_close, require_same_bits
from penstock.tools.gpu.cases.elementwise import EPS, TOLERANCE, make, poisoned, rope_rows
from penstock.tools.gpu.cases.products.quantized import FORMS, random_weight

CPU = torch.device("cpu")
_PAGE_SIZE_TOKENS = 16
_HEADS = HeadShape(2, 1, 64)
_TOLERANCE = TOLERANCE[ROW_DTYPE]


@dataclass(frozen=True)
class RowCase:
    """A layer's sizes, random weights for them, and rows."""

    hidden: int
    width: int
    num_rows: int
    heads: HeadShape = _HEADS
    kv_dtype: str = "bf16"
    has_bias: bool = False
    scale: float = 1.0
    rotary_dim: int = 64
    has_head_norms: bool = False
    claiming_blocks: int = 0
    ropes_by_token: bool = False
    form: str | None = None
    """Form of the weights, one of `quantized.FORMS`; None for bf16."""

    def random(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def linear(self, outputs: int, inputs: int, seed: int) -> RowLinear:
        bias = self.random(outputs, seed=seed + 1).to(ROW_DTYPE) if self.has_bias else None
        if self.form is not None:
            return pack_weight(random_weight(outputs, inputs, FORMS[self.form]), CPU, bias, self.scale, is_gated=False)
        weight = (self.random(outputs, inputs, seed=seed) / inputs**0.5).to(ROW_DTYPE)
        return CudaLinear(weight, weight.t(), bias, self.scale)

    def weights(self, linear: RowLinear, inputs: int) -> Tensor:
        """[outputs, inputs] in float64."""
        if not isinstance(linear, CudaQuantizedLinear):
            return linear.weight.double()
        return random_weight(linear.num_outputs, inputs, linear.form).dequantize().double()

    def product(self, x: Tensor, linear: RowLinear) -> Tensor:
        """The product in float64."""
        y = x.double() @ self.weights(linear, x.shape[1]).T
        return (y if linear.bias is None else y + linear.bias.double()) * linear.scale

    def products(self, launcher: Launcher) -> RowProducts:
        sizes = self.heads, self.hidden, self.rotary_dim, EPS, self.layout, self.claiming_blocks
        made = RowProducts(launcher, CPU, *sizes, ropes_by_token=self.ropes_by_token)
        launcher.prepare(made.kernels([None if self.form is None else FORMS[self.form]]))
        return made

    @property
    def layout(self) -> CacheLayout:
        heads = self.heads
        return CacheLayout(1, self.num_rows + 1, _PAGE_SIZE_TOKENS, heads.num_kv_heads, heads.head_dim, self.kv_dtype)

    def residual(self) -> Tensor:
        """Rows of very different sizes."""
        sizes = torch.tensor([1.0, 30.0, 0.05]).repeat(-(-self.num_rows // 3))[: self.num_rows, None]
        return self.random(self.num_rows, self.hidden, seed=1) * sizes

    def norm(self) -> Tensor:
        return self.random(self.hidden, seed=2)

    def activations(self, inputs: int) -> Tensor:
        return self.random(self.num_rows, inputs, seed=3).to(ROW_DTYPE)

    def begun(self, products: RowProducts) -> WeighedRows:
        return products.weigh(self.residual(), self.norm(), poisoned(self.num_rows, self.hidden, dtype=ROW_DTYPE))


def normed(residual: Tensor, norm: Tensor) -> Tensor:
    """The normed rows in float64."""
    x = residual.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * norm.double()


def finished(rows: WeighedRows) -> Tensor:
    """The norm's rows as a product reads them, in float64."""
    values = rows.values.double()
    return values * (rows.squares.double().sum(dim=1, keepdim=True) / values.shape[1] + EPS).rsqrt()


def _close(what: str, found: Tensor, expected: Tensor) -> float:
    """A number may be off by a rounding of its own, or by a small share of its row's largest one."""
    scale = expected.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return require_close(what, found / scale, expected / scale, _TOLERANCE, 1e-2 * _TOLERANCE)


def check_add(launcher: Launcher, case: RowCase) -> float:
    """The residual stream to fp32, and the norm of the sum that the next product sees."""
    products, linear = case.products(launcher), case.linear(case.hidden, case.width, seed=4)
    residual, x = case.residual(), case.activations(case.width)
    expected = residual.double() + case.product(x, linear)
    hidden, norm = poisoned(case.num_rows, case.hidden, dtype=ROW_DTYPE), case.norm()
    products.weigh(residual, norm, hidden)  # as in a step, a launch that waits for those before it
    rows = products.add(x, linear, residual, norm, hidden)
    require_close("the residual stream", residual, expected, 1e-5, 1e-5 * max(1.0, float(expected.abs().max())))
    return _close("the norm", finished(rows), normed(residual, case.norm()))


def check_gate(launcher: Launcher, case: RowCase) -> float:
    """After a sum, whose tiles leave parts of the norm."""
    products, linear = case.products(launcher), case.linear(2 * case.width, case.hidden, seed=5)
    out, hidden = (poisoned(case.num_rows, size, dtype=ROW_DTYPE) for size in (case.width, case.hidden))
    down, x = case.linear(case.hidden, case.width, seed=4), case.activations(case.width)
    residual, norm = case.residual(), case.norm()
    begun = products.weigh(residual, norm, hidden)
    _close("the first norm", finished(begun), normed(residual, norm))
    rows = products.add(x, down, residual, norm, hidden)
    products.gate(rows, linear, out)
    gate, up = case.product(finished(rows), linear).chunk(2, dim=1)
    return _close("the gated product", out, torch.nn.functional.silu(gate) * up)


def check_multiply(launcher: Launcher, case: RowCase) -> float:
    products, linear = case.products(launcher), case.linear(case.width, case.hidden, seed=6)
    x, out = case.begun(products).values, poisoned(case.num_rows, case.width, dtype=ROW_DTYPE)
    return _close("the product", products.multiply(x, linear, out), case.product(x, linear))


def check_store(launcher: Launcher, case: RowCase) -> float:
    """The product to float64. Rotated queries and the cache have the bits of `rope_and_store` after that product."""
    heads, products = case.heads, case.products(launcher)
    linear = case.linear(heads.qkv_size, case.hidden, seed=7)
    step = RowArrays(torch.arange(case.num_rows + 1, dtype=torch.int32), *_positions(case))
    page_table = torch.arange(1, case.num_rows + 1, dtype=torch.int32)[:, None]
    rope = rope_rows(max(_PAGE_SIZE_TOKENS, case.num_rows), case.rotary_dim)
    ropes = rope, 1.5 * rope
    norms = (case.random(heads.head_dim, seed=8), case.random(heads.head_dim, seed=9)) if case.has_head_norms else None
    q_size = heads.output_size

    def run(rotates: bool) -> tuple[Tensor, Tensor]:
        qkv = poisoned(case.num_rows, heads.qkv_size, dtype=ROW_DTYPE)
        cache = torch.full((case.layout.layer_bytes,), 0x55, dtype=torch.uint8)
        rope, query_rope = ropes if rotates else (None, None)
        products.store(
            case.begun(products), linear, qkv, cache, page_table, step, rope, norms if rotates else None, query_rope
        )
        return qkv, cache

    plain, _ = run(rotates=False)
    error = _close("q, k and v", plain, case.product(finished(case.begun(products)), linear))
    qkv, cache = run(rotates=True)
    require_same_bits("k and v beside the cache", qkv[:, q_size:], plain[:, q_size:])
    sizes = case.hidden, case.rotary_dim, case.kv_dtype, _PAGE_SIZE_TOKENS
    kernels = make(launcher, ROW_DTYPE, heads, *sizes, ropes_by_token=case.ropes_by_token)
    expected_cache = torch.full_like(cache, 0x55)
    kernels.rope_and_store(plain, expected_cache, page_table, step, ropes[0], norms, ropes[1])
    require_same_bits("the queries", qkv, plain)
    require_same_bits("the cache", cache, expected_cache)
    require("a padding row has no place in the cache", bool((cache != 0x55).any()))
    return error


def _positions(case: RowCase) -> tuple[Tensor, Tensor]:
    """context_lens and slots; from two rows on, the second is padding."""
    contexts = torch.arange(case.num_rows, dtype=torch.int32) * 5 % _PAGE_SIZE_TOKENS
    slots = torch.arange(case.num_rows, dtype=torch.int32).flip(0)
    if case.num_rows > 1:
        slots[1] = -1
    return contexts, slots


def check_company(launcher: Launcher, case: RowCase) -> None:
    """A row's bits depend neither on the other rows nor on its place."""

    def run(case: RowCase, order: list[int]) -> tuple[Tensor, Tensor]:
        products, linear = case.products(launcher), case.linear(case.hidden, case.width, seed=4)
        residual, x = case.residual()[order], case.activations(case.width)[order]
        hidden = poisoned(len(order), case.hidden, dtype=ROW_DTYPE)
        rows = products.add(x, linear, residual, case.norm(), hidden)
        out = poisoned(len(order), case.width, dtype=ROW_DTYPE)
        products.gate(rows, case.linear(2 * case.width, case.hidden, seed=5), out)
        return residual, out

    together = run(case, list(range(case.num_rows)))
    for order in ([*range(case.num_rows)][::-1], [case.num_rows - 1], [0]):
        for what, found, expected in zip(("residual", "gated"), run(case, order), together, strict=True):
            require_same_bits(f"{what} in the order {order}", found, expected[order])


CASES = {
    "small": RowCase(72, 40, 3, has_bias=True, scale=0.5),
    "one row": RowCase(264, 136, 1),
    "full": RowCase(328, 104, 32, heads=HeadShape(4, 2, 96), rotary_dim=32, has_head_norms=True),
}
STORED = {form: RowCase(200, 136, 11, has_bias=True, scale=0.02, form=form) for form in ("int8", "fp8", "fp8-128")}
"""By the form of the weights; their inputs do not fill the last chunk."""
WIDE = RowCase(4104, 40, 2)
"""Its outputs are cut into larger tiles."""


def small_case(kv_dtype: str) -> RowCase:
    return replace(CASES["small"], kv_dtype=kv_dtype, heads=HeadShape(2, 1, 128), has_head_norms=True)


def check_claims(launcher: Launcher, case: RowCase) -> None:
    """Blocks that claim tiles give the bits of a block for each, with any number of blocks."""

    def run(claiming_blocks: int) -> tuple[Tensor, ...]:
        claiming = replace(case, claiming_blocks=claiming_blocks)
        products, rows = claiming.products(launcher), claiming.begun(claiming.products(launcher))
        outs = []
        for _ in range(2):  # the first one leaves the counter as it was
            out = poisoned(case.num_rows, case.width, dtype=ROW_DTYPE)
            products.gate(rows, case.linear(2 * case.width, case.hidden, seed=5), out)
            outs += [out, poisoned(case.num_rows, case.width, dtype=ROW_DTYPE)]
            products.multiply(rows.values, case.linear(case.width, case.hidden, seed=6), outs[-1])
        return tuple(outs)

    expected = run(0)
    for num_blocks in (1, 4, 100):
        for found, same in zip(run(num_blocks), expected, strict=True):
            require_same_bits(f"from {num_blocks} blocks", found, same)


CLAIMED = {
    form or "bf16": RowCase(hidden, 88, rows, has_bias=True, scale=0.5, form=form)
    for form, hidden, rows in ((None, 1304, 4), ("fp8-128", 2568, 1))
}
"""Inputs that do not fill the last chunk, and outputs that do not fill the last tile, of six or twelve."""
CHECKS = (check_add, check_gate, check_multiply, check_store)
