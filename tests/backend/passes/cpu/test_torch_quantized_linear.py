"""Products with quantised weights in torch, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.quantization.quantizer import quantize
from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
from penstock.backend.passes.cpu.in_torch import torch_quantized_linear
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import UNIT, QuantizedLinear
from tests.backend.passes.cpu.ops_harness import BF16, FP32, randn
from tests.backend.passes.cpu.test_quantized_linear import GROUPED, random_weight


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("group_size", [None, 32, 128])
@pytest.mark.parametrize("biased", [False, True])
def test_product_of_whole_steps_is_that_of_the_dequantised_weight(
    group_size: int | None, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of integers up to 127, times a power of 2, are the same numbers in int8."""
    monkeypatch.setattr(torch_quantized_linear, "_BLOCK_VALUES", 1 << 17)  # several blocks
    outputs, inputs = 70, 4096 + 128
    weight = quantize([randn(outputs, inputs, seed=1)], (outputs, inputs), group_size)
    x = torch.from_numpy(np.random.default_rng(2).integers(-127, 128, (9, inputs)))
    x[:, ::UNIT], x[4] = 127, 0
    x = (x * 2.0 ** torch.arange(-40, 41, 10)[:, None]).to(dtype)
    bias = randn(outputs, seed=3) if biased else torch.zeros(outputs)
    exact = x.double() @ weight.dequantize().double().T + bias
    size = x.double().abs() @ weight.dequantize().double().abs().T + bias.abs()
    found = QuantizedLinear(weight, bias if biased else None)(x)
    assert found.dtype is FP32
    assert ((found - exact).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("form", GROUPED)
def test_product_of_a_grouped_weight_is_that_of_the_dequantised_one(form: str) -> None:
    weight = random_weight(form, 70, 512)
    x = torch.from_numpy(np.random.default_rng(2).integers(-127, 128, (9, 512))).float()
    x[:, ::UNIT] = 127
    exact = x.double() @ weight.dequantize().double().T
    size = x.double().abs() @ weight.dequantize().double().abs().T
    assert ((QuantizedLinear(weight, None)(x) - exact).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("group_size", [None, 32])
def test_activations_are_off_by_at_most_half_a_step(group_size: int | None) -> None:
    weight = quantize([randn(50, 96, seed=1)], (50, 96), group_size)
    x = randn(7, 96, seed=2) * torch.logspace(-3, 3, 7)[:, None]
    exact, plain = x.double() @ weight.dequantize().double().T, weight.dequantize().double()
    half_steps = x.double().abs().amax(dim=1, keepdim=True) / 127 / 2
    found = QuantizedLinear(weight, None)(x).double()
    assert ((found - exact).abs() <= half_steps * plain.abs().sum(dim=1) * (1 + 1e-5)).all()
    # Errors of rounding nearly cancel; a wrong formula would not.
    assert (found - exact).square().mean(dim=1).sqrt().div(exact.square().mean(dim=1).sqrt()).max() < 0.02


def test_row_with_a_number_that_is_not_finite_has_no_finite_output() -> None:
    weight = quantize([randn(5, 64)], (5, 64), 32)
    for number in (torch.nan, torch.inf):
        x = randn(3, 64, seed=1)
        x[1, 7] = number
        found = QuantizedLinear(weight, None)(x)
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]
        assert found[1].isnan().all()


@pytest.mark.parametrize("group_size", [None, 32])
def test_rows_of_a_quantised_table_are_its_dequantised_rows(group_size: int | None) -> None:
    weight = quantize([randn(20, 64)], (20, 64), group_size)
    ids = torch.tensor([19, 0, 3, 3])
    assert torch.equal(take_rows(weight, ids).dequantize(), weight.dequantize()[ids])
