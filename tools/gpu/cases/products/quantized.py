"""Linears with 8-bit and 4-bit weights, checked against float64 products with the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form, Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm, WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    MXFP4_EXPONENTS,
    MXFP4_GROUP_SIZE,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
)
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.ops.matmul import BlockedMatmul, Matmul, WholeMatmul
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.tools.gpu.cases.check import require_close, require_same_bits
from penstock.tools.gpu.cases.elementwise import TOLERANCE, ints, poisoned

CPU = torch.device("cpu")
"""The device of all tensors if the launcher copies them to the GPU and back."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMS: dict[str, WeightForm] = {
    "int8": PackedForm(None),
    "int4": PackedForm(32),
    "int4-128": PackedForm(128),
    "mxfp4": PackedForm(MXFP4_GROUP_SIZE, has_zeros=False),
    "fp8": Float8Form(None),
    "fp8-128": Float8Form(128),
    "q4_1": GroupedForm(4, 32, 32, has_minima=True),
    "q8_0": GroupedForm(8, 32, 32, has_minima=False),
}
LARGE_BLOCKS: dict[str, WeightForm] = {
    "q4_k": GroupedForm(4, 32, 256, has_minima=True),
    "q6_k": GroupedForm(8, 16, 256, has_minima=False),
    "q4_k and q6_k": GroupedForm(8, 16, 256, has_minima=True),
}
"""These need a multiple of 256 inputs."""
ALL_FORMS = FORMS | LARGE_BLOCKS


def random_weight(outputs: int, inputs: int, form: WeightForm) -> QuantizedWeight:
    """All finite values and all zero points, scales of both signs, and an output whose scales are 0 or small."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    if isinstance(form, GroupedForm):
        return _random_blocks(outputs, inputs, form, generator)
    group_size = form.group_size
    groups = (outputs,) if group_size is None else (outputs, -(-inputs // group_size))
    scales = torch.randn(groups, generator=generator).half().float()
    scales[outputs // 2] = 0.0
    if isinstance(form, Float8Form):
        bits = torch.randint(0, 254, (outputs, inputs), generator=generator, dtype=torch.uint8)
        bits += bits >= 127  # 127 and 255 are NaN
        return Float8Weight(bits, scales.view(outputs, -1) / 64, group_size)
    if group_size is None:
        values = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        return Int8Weight(values, scales / 16)
    values = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    if form == FORMS["mxfp4"]:
        exponents = torch.randint(-5, 4, groups, generator=generator)
        exponents[outputs // 2] = MXFP4_EXPONENTS[0]
        return Mxfp4Weight(values, torch.ldexp(torch.ones(groups), exponents))
    zeros = torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8)
    return Int4Weight(values, scales, zeros, group_size)


def _random_blocks(outputs: int, inputs: int, form: GroupedForm, generator: torch.Generator) -> QuantizedWeight:
    bits = torch.randint(0, 256, (outputs, inputs * form.bits // 8), generator=generator, dtype=torch.uint8)
    factors = torch.randn(outputs, inputs // form.block_size, form.num_factors, generator=generator) / 128
    factors[outputs // 2] = 0.0
    groups = (outputs, inputs // form.group_size if form.has_multipliers else 0, form.num_factors)
    multipliers = torch.randint(-128, 128, groups, generator=generator, dtype=torch.int8)
    return GroupedWeight(form, bits.view(torch.int8) if form.bits == 8 else bits, factors.half().float(), multipliers)


@dataclass(frozen=True)
class LinearCase:
    """A linear with random weights, and rows for it."""

    form: str
    outputs: int
    inputs: int
    num_rows: int
    dtype: torch.dtype
    has_bias: bool = False
    scale: float = 1.0

    def weight(self) -> QuantizedWeight:
        return random_weight(self.outputs, self.inputs, ALL_FORMS[self.form])

    def bias(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(2)
        return torch.randn(self.outputs, generator=generator).to(self.dtype) * 8 if self.has_bias else None

    def rows(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.num_rows, self.inputs, generator=generator).to(self.dtype)

    def run(self, launcher: Launcher, x: Tensor, matmul: Matmul, device: torch.device = CPU) -> Tensor:
        """[n, outputs], computed on the device."""
        products = QuantizedProducts(launcher, device, self.dtype, len(x), matmul)
        return self.multiply(launcher, products, x, device)

    def multiply(self, launcher: Launcher, products: QuantizedProducts, x: Tensor, device: torch.device) -> Tensor:
        bias = self.bias()
        weights = products.pack(self.weight(), None if bias is None else bias.to(device), self.scale)
        launcher.prepare(products.kernels())
        out = poisoned(len(x), self.outputs, dtype=self.dtype).to(device)
        return products.multiply(x.to(device), weights, out).cpu()

    def expected(self, x: Tensor, weights: Tensor) -> Tensor:
        """In float64; weights: [outputs, inputs]."""
        product = x.double() @ weights.double().T
        bias = self.bias()
        return (product if bias is None else product + bias.double()) * self.scale


def check_linear(launcher: Launcher, case: LinearCase, matmul: Matmul | None = None) -> float:
    """Our kernel's product. Returns the error as a share of the tolerance."""
    x, weights = case.rows(), case.weight().dequantize()
    if isinstance(case.weight().form, GroupedForm):
        weights = weights.to(case.dtype)  # which has the numbers of no block exactly
    return _check_close(case, case.run(launcher, x, matmul or BlockedMatmul()), case.expected(x, weights))


def check_widened(launcher: Launcher, case: LinearCase, device: torch.device = CPU) -> float:
    """The library's product with weights that are widened in memory, where they are rounded to the dtype once."""
    x, widened = case.rows(), case.weight().dequantize().to(case.dtype)
    return _check_close(case, case.run(launcher, x, WholeMatmul(8), device), case.expected(x, widened))


def check_company(launcher: Launcher, case: LinearCase) -> None:
    """A row's bits depend neither on the other rows nor on its place."""
    x = case.rows()
    together = case.run(launcher, x, BlockedMatmul())
    require_same_bits("in reverse", case.run(launcher, x.flip(0), BlockedMatmul()), together.flip(0))
    alone = replace(case, num_rows=1)
    for row in (0, len(x) - 1):
        require_same_bits(f"row {row} alone", alone.run(launcher, x[row : row + 1], BlockedMatmul())[0], together[row])


def check_embedding(launcher: Launcher, case: LinearCase) -> float:
    """Rows of a quantised table, a token outside of it, and one of a slot."""
    products = QuantizedProducts(launcher, torch.device("cpu"), case.dtype, 4, BlockedMatmul())
    table = products.pack(case.weight(), None)
    rows, residual = RowArrays(ints(0, 1, 4), ints(0, 0), ints(1, 0)), poisoned(4, case.inputs, dtype=torch.float32)
    last = case.outputs - 1
    products.embed(table, ints(-1, last, case.outputs, 0), rows, ints(0, 3), residual, 2.0)
    weights = case.weight().dequantize() * 2.0
    expected = torch.stack([weights[3], weights[last], torch.zeros(case.inputs), weights[0]])
    return require_close("the embeddings", residual, expected, 1e-6, 0.0)


def _check_close(case: LinearCase, found: Tensor, expected: Tensor) -> float:
    """A number may be off by a rounding of its own, or by a small share of its row's largest one."""
    tolerance = TOLERANCE[case.dtype]
    return require_close("the product", found, expected, tolerance, 1e-2 * tolerance * float(expected.abs().max()))
