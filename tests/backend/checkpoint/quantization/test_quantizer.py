"""The arithmetic of quantisation against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.checkpoint.quantization.quantizer import RANGE_FACTORS, UnquantizableError, quantize
from penstock.backend.checkpoint.weight_forms.quantized_weights import Int4Weight, Int8Weight


def matrix(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Rows of different magnitudes, with outliers, zeros, and numbers of one sign."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(3, (outputs, inputs)) * np.exp(rng.normal(-4, 2, (outputs, 1)))
    weight[outputs // 2] = 0
    weight[outputs // 3, : inputs // 2] = 0
    weight[outputs // 4] = np.abs(weight[outputs // 4])
    weight[outputs // 5] = -np.abs(weight[outputs // 5])
    return torch.from_numpy(weight).float()


def blocks(weight: Tensor, num_rows: int) -> list[Tensor]:
    """Copies, because a block may be changed."""
    return [block.clone() for block in weight.split(num_rows)]


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_int8_is_the_nearest_of_127_steps_each_way(num_rows: int) -> None:
    weight = matrix(23, 80)
    found = quantize(blocks(weight, num_rows), (23, 80), None)
    assert isinstance(found, Int8Weight)
    exact = weight.double().numpy()
    top = np.abs(exact).max(axis=1)
    np.testing.assert_allclose(found.scales.numpy(), top / 127, rtol=1e-6)
    assert (found.values.abs().amax(dim=1).numpy() == np.where(top > 0, 127, 0)).all()
    error = np.abs(found.dequantize().double().numpy() - exact)
    assert (error <= top[:, None] / 127 / 2 * (1 + 1e-5)).all()


def int4_groups(weight: Tensor, group_size: int) -> tuple[Int4Weight, NDArray[np.float64], NDArray[np.float64]]:
    """The quantised weight, its numbers and the exact ones, as [groups, group_size]."""
    found = quantize(blocks(weight, 7), (len(weight), weight.shape[1]), group_size)
    assert isinstance(found, Int4Weight)
    return found, *(x.double().numpy().reshape(-1, group_size) for x in (found.dequantize(), weight))


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_is_the_nearest_step_within_its_range(group_size: int) -> None:
    found, approximate, exact = int4_groups(matrix(30, 256), group_size)
    scales = found.scales.double().numpy().reshape(-1, 1)
    zeros = found.zeros.double().numpy().reshape(-1, 1)
    nearest = np.clip(exact, -zeros * scales, (15 - zeros) * scales)
    assert (np.abs(approximate - nearest) <= scales / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_is_at_least_as_good_as_the_whole_range(group_size: int) -> None:
    """For each group, compared with the widest range that is tried; for all together, with the bare range."""
    _, approximate, exact = int4_groups(matrix(30, 256, seed=1), group_size)
    errors = ((approximate - exact) ** 2).sum(axis=1)
    bounds = []
    for factor in (RANGE_FACTORS[0], 1.0):
        low, high = np.minimum(exact.min(axis=1), 0), np.maximum(exact.max(axis=1), 0)
        scale = ((high - low) * factor / 15).astype(np.float16).astype(np.float64)[:, None]
        divisor = np.where(scale > 0, scale, 1)
        zero = np.rint(-low[:, None] * factor / divisor)
        steps = np.clip(np.rint(exact / divisor) + zero, 0, 15)
        bounds.append((((steps - zero) * scale - exact) ** 2).sum(axis=1))
    assert (errors <= bounds[0] * (1 + 1e-4) + 1e-20).all()
    scattered = bounds[1] > 0
    assert np.mean(errors[scattered] / bounds[1][scattered]) < 0.97


@settings(max_examples=60)
@given(
    numbers=st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32),
    group_size=st.sampled_from([None, 32]),
)
def test_any_numbers_are_off_by_at_most_a_tenth_of_their_range(numbers: list[float], group_size: int | None) -> None:
    weight = torch.tensor([numbers])
    found = quantize([weight.clone()], (1, 32), group_size).dequantize()
    width = max(*numbers, 0) - min(*numbers, 0)
    # Narrow ranges end where binary16 does.
    assert float((found - weight).abs().max()) <= max(0.36 * width, 2e-6)
    assert float((found - weight).square().mean().sqrt()) <= max(0.1 * width, 2e-6)


def test_numbers_too_small_for_a_scale_become_zeros() -> None:
    weight = torch.full((1, 32), 1e-9)
    assert quantize([weight.clone()], (1, 32), 32).dequantize().abs().max() == 0
    weight = torch.full((1, 32), 1e-45)
    assert quantize([weight.clone()], (1, 32), None).dequantize().abs().max() == 0


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_row(number: float, group_size: int | None) -> None:
    weight = matrix(20, 64)
    weight[13, 40] = number
    with pytest.raises(UnquantizableError, match="not finite") as refused:
        quantize(blocks(weight, 4), (20, 64), group_size)
    assert refused.value.row == 12


def test_numbers_too_large_for_binary16_scales_are_refused() -> None:
    with pytest.raises(UnquantizableError, match=r"up to 2e\+06, too large for int4"):
        quantize([torch.full((1, 32), 2e6)], (1, 32), 32)


def test_blocks_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(64, 256, seed=2)
    results = []
    for threads, num_rows in ((1, 64), (4, 1), (2, 9)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = quantize(blocks(weight, num_rows), (64, 256), 128)
        assert isinstance(found, Int4Weight)
        results.append((found.values, found.scales, found.zeros))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
