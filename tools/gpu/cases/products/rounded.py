"""Rows that are rounded to 8 bits, and their products, checked against float64 products of the same 8-bit numbers.

torch multiplies on the device of its tensors. Torch 2.10 has no product of E4M3 with a scale for each row on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.ops.matmul import WholeMatmul
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.cuda.ops.rounded_rows import FLOAT8_CAPABILITY, RoundedProducts, rounding_kernels
from penstock.tools.gpu.cases.check import require, require_close, require_same_bits
from penstock.tools.gpu.cases.elementwise import TOLERANCE
from penstock.tools.gpu.cases.products.quantized import CPU, LinearCase
from penstock.tools.gpu.cases.products.quantized import FORMS as ALL_FORMS

FORMS = ("int8", "fp8")
MIN_ROUNDED_ROWS = 17
"""The library multiplies no fewer rows of integers."""
_LARGEST = {"int8": torch.tensor(127.0), "fp8": torch.tensor(448.0)}
"""Tensors, because torch divides a number by a tensor in two roundings."""
_FLOAT8_SUM_ERROR = 1e-3
"""Error of a sum of E4M3 products, as a share of its row's largest. Hopper's matrix units add them with about 14 bits
(DeepSeek-V3 Technical Report, 3.3.2); an H100 missed the tolerance of other products by 2.3 times, at 4,096 inputs."""


def rounded(x: Tensor, form: str) -> Tensor:
    """float64: the numbers that stand for x [T, inputs], row by row, by the definition."""
    numbers = x.float()
    peak = numbers.abs().amax(dim=-1, keepdim=True)
    scaled = numbers * (_LARGEST[form] / peak)
    values = scaled.round() if form == "int8" else scaled.to(torch.float8_e4m3fn)
    return values.double() * (peak / _LARGEST[form])


def check_rounding(launcher: Launcher, form: str, dtype: torch.dtype, inputs: int) -> None:
    """Every number is at most half a step of its row from its own, in the order of inputs that weights have."""
    x = _rows_of_all_sizes(LinearCase(form, 16, inputs, 40, dtype).rows())
    width = -(-inputs // 64) * 64
    bits, scales = torch.full((len(x), width), 0x7F, dtype=torch.uint8), torch.full((len(x), 1), torch.nan)
    kernel, *_ = rounding_kernels(ALL_FORMS[form], dtype)
    launcher.launch(kernel, (len(x), 1, 1), x, bits, scales, np.int32(inputs), np.int32(width))
    values = bits.view(torch.int8 if form == "int8" else torch.float8_e4m3fn).double()
    ordered = values.view(len(x), -1, 4, 2, 8).transpose(2, 3).reshape(len(x), width)
    require("numbers behind the last input", not ordered[:, inputs:].any())
    found, numbers = ordered[:, :inputs] * scales, x.double()
    peak = numbers.abs().amax(dim=-1, keepdim=True)
    require_close("the scales", scales, peak / _LARGEST[form], 1e-6, 1e-37)
    # Steps of E4M3 are an eighth of a power of two, from 2^-9 on.
    half_step = 0.5 * scales if form == "int8" else torch.maximum(numbers.abs() / 16, scales * 2**-10)
    require("a number is further than half a step", bool(((found - numbers).abs() <= 1.001 * half_step).all()))


def run(
    launcher: Launcher,
    case: LinearCase,
    x: Tensor,
    capability: tuple[int, int] = FLOAT8_CAPABILITY,
    device: torch.device = CPU,
) -> Tensor:
    """[T, outputs], computed on the device."""
    products = RoundedProducts(launcher, device, case.dtype, len(x), case.inputs, capability, MIN_ROUNDED_ROWS)
    return case.multiply(
        launcher, QuantizedProducts(launcher, device, case.dtype, len(x), WholeMatmul(8), products), x, device
    )


def check_rounded(
    launcher: Launcher,
    case: LinearCase,
    capability: tuple[int, int] = FLOAT8_CAPABILITY,
    device: torch.device = CPU,
) -> float:
    """Rows of very different sizes, one of zeros, and two that are not finite, which spoil no other row.

    The library has no product of E4M3 in fp16, or with a scale of all results: such rows keep 16 bits. Returns the
    error as a share of the tolerance.
    """
    x = _rows_of_all_sizes(case.rows())
    is_float = isinstance(ALL_FORMS[case.form], Float8Form)
    keeps_16_bits = is_float and (
        case.dtype is not torch.bfloat16 or case.scale != 1.0 or capability < FLOAT8_CAPABILITY
    )
    weights = case.weight().dequantize()
    expected = case.expected(x, weights.to(case.dtype)) if keeps_16_bits else _expected(case, x, weights)
    faulty = x.clone()
    faulty[5, 1], faulty[-1, -1] = torch.nan, torch.inf
    found = run(launcher, case, faulty, capability, device)
    require_same_bits("rows with a NaN or an infinity are finite", found[[5, -1]].isfinite().any(), torch.tensor(False))
    is_sound = faulty.isfinite().all(dim=-1)
    tolerance = TOLERANCE[case.dtype]
    sizes = expected.abs().amax(dim=-1, keepdim=True) + 1e-30
    found = found.double() / sizes
    least = 1e-2 * tolerance if keeps_16_bits or not is_float else _FLOAT8_SUM_ERROR
    return require_close("the product", found[is_sound], (expected / sizes)[is_sound], tolerance, least)


def _rows_of_all_sizes(x: Tensor) -> Tensor:
    scaled = x * torch.logspace(-3, 1, len(x))[:, None].to(x.dtype)
    scaled[3] = 0.0
    return scaled


def _expected(case: LinearCase, x: Tensor, weights: Tensor) -> Tensor:
    numbers = rounded(x, case.form)
    numbers[3] = 0.0
    return case.expected(numbers, weights)
