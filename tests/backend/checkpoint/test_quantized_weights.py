"""Quantised weights: what their numbers stand for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm, StackedForm, WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
)
from penstock.backend.checkpoint.weight_forms.stacked_weights import stacked_form

INT8 = Int8Weight(torch.tensor([[-128, 0, 3], [1, 2, 127]], dtype=torch.int8), torch.tensor([0.5, 2.0]))
INT4 = Int4Weight(
    torch.tensor([[0x10 * (2 * i % 16) + i for i in range(16)] * 2], dtype=torch.uint8),
    torch.tensor([[0.5, -2.0]]),
    torch.tensor([[8, 0]], dtype=torch.uint8),
    32,
)
MXFP4 = Mxfp4Weight(torch.tensor([[0x10 * (15 - i) + i for i in range(16)]], dtype=torch.uint8), torch.tensor([[0.5]]))


GROUPED = GroupedWeight(
    GroupedForm(4, 16, 32, has_minima=True),
    torch.full((1, 16), 0x53, dtype=torch.uint8),
    torch.tensor([[[0.5, 2.0]]]),
    torch.tensor([[[3, 1], [-4, 0]]], dtype=torch.int8),
)


def test_grouped_values_are_scaled_and_lowered_per_group() -> None:
    assert GROUPED.shape == (1, 32)
    assert GROUPED.dequantize().tolist() == [[1.5 * 3 - 2, 1.5 * 5 - 2] * 8 + [-6.0, -10.0] * 8]


Q8_0, Q5_1 = GroupedForm(8, 32, 32, has_minima=False), GroupedForm(5, 32, 32, has_minima=True)
Q4_K, Q6_K = GroupedForm(4, 32, 256, has_minima=True), GroupedForm(6, 16, 256, has_minima=False)


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        ([Q8_0, Q8_0], Q8_0),
        ([Q8_0, Q5_1], GroupedForm(8, 32, 32, has_minima=True)),
        ([Q4_K, Q4_K, Q6_K], GroupedForm(8, 16, 256, has_minima=True)),
        ([Q8_0, Q6_K], None),
        ([PackedForm(None), Q8_0], None),
        ([PackedForm(32), PackedForm(128)], None),
        ([Q8_0, None], None),
    ],
)
def test_matrices_in_one_part_have_a_form_that_holds_the_numbers_of_all(
    forms: list[WeightForm | None], expected: WeightForm | None
) -> None:
    assert stacked_form(forms, [64] * len(forms), has_cpu_kernels, in_parts=False) == expected


def test_matrices_in_parts_of_whole_panels_keep_their_forms() -> None:
    forms, outputs = [Q4_K, Q4_K, Q6_K], [128, 64, 64]
    kept = StackedForm(((Q4_K, 128), (Q4_K, 64), (Q6_K, 64)))
    assert stacked_form(forms, outputs, has_cpu_kernels, in_parts=True) == kept
    assert kept.num_bytes((256, 512)) == Q4_K.num_bytes((192, 512)) + Q6_K.num_bytes((64, 512))
    common = GroupedForm(8, 16, 256, has_minima=True)
    assert stacked_form(forms, [128, 64, 32], has_cpu_kernels, in_parts=True) == common
    assert stacked_form(forms, outputs, lambda form: form != kept, in_parts=True) == common


def test_int8_values_are_scaled_per_output() -> None:
    assert INT8.shape == (2, 3)
    assert INT8.dequantize().tolist() == [[-64.0, 0.0, 1.5], [2.0, 4.0, 254.0]]


def test_int4_values_are_scaled_per_group_and_even_inputs_are_the_low_bits() -> None:
    assert INT4.shape == (1, 64)
    values = [value for i in range(16) for value in (i, 2 * i % 16)]
    assert INT4.dequantize().tolist() == [[0.5 * (value - 8) for value in values] + [-2.0 * value for value in values]]


def test_mxfp4_values_are_numbers_of_e2m1_and_even_inputs_are_the_low_bits() -> None:
    numbers = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
    numbers += [-number for number in numbers]
    assert MXFP4.dequantize().tolist() == [[number for i in range(16) for number in (numbers[i], numbers[15 - i])]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(INT8, values=INT8.values.short()), "values must be torch.int8"),
        (lambda: replace(INT8, values=torch.zeros(2, 0, dtype=torch.int8)), "not 0"),
        (lambda: replace(INT8, values=torch.zeros(2, 131073, dtype=torch.int8)), "not 131073"),
        (lambda: replace(INT8, scales=torch.ones(3)), r"scales must be \[2\], not \[3\]"),
        (lambda: replace(INT8, scales=torch.tensor([1.0, torch.inf])), "finite"),
        (lambda: replace(INT8, scales=torch.tensor([1.0, torch.nan])), "finite"),
        (lambda: replace(INT4, group_size=64), "not 64"),
        (lambda: replace(INT4, group_size=128), "64 inputs cannot be divided into groups of 128"),
        (lambda: replace(INT4, scales=torch.tensor([[0.1, 1.0]])), "binary16"),
        (lambda: replace(INT4, scales=torch.tensor([[1e5, 1.0]])), "binary16"),
        (lambda: replace(INT4, zeros=torch.full((1, 2), 16, dtype=torch.uint8)), "from 0 to 15"),
        (lambda: replace(INT4, zeros=INT4.zeros[:, :1]), r"zeros must be \[1, 2\], not \[1, 1\]"),
        (lambda: replace(INT4, zeros=INT4.zeros.int()), "zeros must be torch.uint8"),
        (lambda: replace(GROUPED, values=GROUPED.values.view(torch.int8)), "values must be torch.uint8"),
        (lambda: replace(GROUPED, values=GROUPED.values[:, :8]), "16 inputs cannot be divided into blocks of 32, 16"),
        (lambda: replace(GROUPED, factors=GROUPED.factors[:, :, :1]), r"factors must be \[1, 1, 2\], not \[1, 1, 1\]"),
        (lambda: replace(GROUPED, factors=GROUPED.factors * 0.1), "factors must be numbers of binary16"),
        (lambda: replace(GROUPED, factors=GROUPED.factors * torch.inf), "factors must be finite"),
        (lambda: replace(GROUPED, multipliers=GROUPED.multipliers[:, :1]), r"multipliers must be \[1, 2, 2\]"),
        (lambda: replace(MXFP4, values=MXFP4.values[:, :8]), "16 inputs cannot be divided into groups of 32"),
        (lambda: replace(MXFP4, scales=torch.ones(1, 2)), r"scales must be \[1, 1\], not \[1, 2\]"),
        *(
            (lambda scale=scale: replace(MXFP4, scales=torch.tensor([[scale]])), r"powers of two from 2\^-23 to 2\^16")
            for scale in (0.75, -1.0, 0.0, 2.0**17, 2.0**-24)
        ),
    ],
)
def test_what_the_form_does_not_allow_is_refused(build: Callable[[], QuantizedWeight], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
