"""Products of many rows that are rounded to 8 bits, checked against float64 products of the same 8-bit numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backend.checkpoint.float8_weight import Float8Form
from penstock.backend.passes.decoder.cuda.ops.matmul import WholeMatmul
from penstock.backend.passes.decoder.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.decoder.cuda.ops.rounded_rows import FLOAT8_CAPABILITY, RoundedProducts
from penstock.tools.gpu_check.cases.comparing import require_close, require_same_bits
from penstock.tools.gpu_check.cases.elementwise import TOLERANCE, poisoned
from penstock.tools.gpu_check.cases.quantized import FORMS as ALL_FORMS

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
    from penstock.tools.gpu_check.cases.quantized import LinearCase

FORMS = ("int8", "fp8")
_LARGEST = {"int8": torch.tensor(127.0), "fp8": torch.tensor(448.0)}
"""Tensors, because torch divides a number by a tensor in two roundings."""


def rounded(x: Tensor, form: str) -> Tensor:
    """float64: the numbers that stand for x [T, inputs], row by row, by the definition."""
    numbers = x.float()
    peak = numbers.abs().amax(dim=-1, keepdim=True)
    scaled = numbers * (_LARGEST[form] / peak)
    values = scaled.round() if form == "int8" else scaled.to(torch.float8_e4m3fn)
    return values.double() * (peak / _LARGEST[form])


def run(launcher: Launcher, case: LinearCase, x: Tensor, capability: tuple[int, int] = FLOAT8_CAPABILITY) -> Tensor:
    """[T, outputs]"""
    device = torch.device("cpu")
    products = RoundedProducts(launcher, device, case.dtype, len(x), case.inputs, capability)
    linears = QuantizedProducts(launcher, device, case.dtype, len(x), WholeMatmul(), products)
    out = poisoned(len(x), case.outputs, dtype=case.dtype)
    return linears.multiply(x, linears.pack(case.weight(), case.bias(), case.scale), out)


def check_rounded(launcher: Launcher, case: LinearCase) -> float:
    """Rows of very different sizes, one of zeros, and two that are not finite, which spoil no other row.

    The library has no product of E4M3 in fp16, or with a scale of all results: such rows keep 16 bits. Returns the
    error as a share of the tolerance.
    """
    x = case.rows()
    x *= torch.logspace(-3, 1, len(x))[:, None].to(x.dtype)
    x[3] = 0.0
    is_float = isinstance(ALL_FORMS[case.form], Float8Form)
    keeps_16_bits = is_float and (case.dtype is not torch.bfloat16 or case.scale != 1.0)
    weights = case.weight().dequantize()
    expected = case.expected(x, weights.to(case.dtype)) if keeps_16_bits else _expected(case, x, weights)
    faulty = x.clone()
    faulty[5, 1], faulty[-1, -1] = torch.nan, torch.inf
    found = run(launcher, case, faulty)
    require_same_bits("rows with a NaN or an infinity are finite", found[[5, -1]].isfinite().any(), torch.tensor(False))
    is_sound = faulty.isfinite().all(dim=-1)
    tolerance = TOLERANCE[case.dtype]
    sizes = expected.abs().amax(dim=-1, keepdim=True) + 1e-30
    found = found.double() / sizes
    return require_close("the product", found[is_sound], (expected / sizes)[is_sound], tolerance, 1e-2 * tolerance)


def _expected(case: LinearCase, x: Tensor, weights: Tensor) -> Tensor:
    numbers = rounded(x, case.form)
    numbers[3] = 0.0
    return case.expected(numbers, weights)
