"""Quantised weights: what their numbers stand for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from penstock.backend.checkpoint.quantized_weights import Int4Weight, Int8Weight, QuantizedWeight

INT8 = Int8Weight(torch.tensor([[-128, 0, 3], [1, 2, 127]], dtype=torch.int8), torch.tensor([0.5, 2.0]))
INT4 = Int4Weight(
    torch.tensor([[0x10 * (2 * i % 16) + i for i in range(16)] * 2], dtype=torch.uint8),
    torch.tensor([[0.5, -2.0]]),
    torch.tensor([[8, 0]], dtype=torch.uint8),
    32,
)


def test_int8_values_are_scaled_per_output() -> None:
    assert INT8.shape == (2, 3)
    assert INT8.dequantize().tolist() == [[-64.0, 0.0, 1.5], [2.0, 4.0, 254.0]]


def test_int4_values_are_scaled_per_group_and_even_inputs_are_the_low_bits() -> None:
    assert INT4.shape == (1, 64)
    values = [value for i in range(16) for value in (i, 2 * i % 16)]
    assert INT4.dequantize().tolist() == [[0.5 * (value - 8) for value in values] + [-2.0 * value for value in values]]


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
    ],
)
def test_what_the_form_does_not_allow_is_refused(build: Callable[[], QuantizedWeight], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
