"""Linears with quantised weights, on each of the native kernels, against exact sums of the quantised numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES, GgmlMatrix
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    BlockWeight,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    StackedWeight,
)
from penstock.backend.checkpoint.weight_forms.stacked_weights import decoded
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import UNIT, round_rows
from tests.backend.passes.conftest import MakeOps, make_native_ops
from tests.backend.passes.cpu.ops_harness import BASE, BF16, FP32, OpsHarness, assert_close, randn, step_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPED = {
    "grouped 8 bits": GroupedForm(8, 32, 32, has_minima=False),
    "grouped 4 bits with minima": GroupedForm(4, 32, 32, has_minima=True),
    "grouped codebook": GroupedForm(4, 32, 32, has_minima=False, codebook="iq4"),
    "blocks of a codebook": GroupedForm(4, 32, 256, has_minima=False, codebook="iq4"),
    "blocks of 4 bits with minima": GroupedForm(4, 32, 256, has_minima=True),
    "grouped 5 bits": GroupedForm(5, 32, 32, has_minima=False),
    "blocks of 5 bits with minima": GroupedForm(5, 32, 256, has_minima=True),
    "blocks of 6 bits": GroupedForm(6, 16, 256, has_minima=False),
    "blocks of 3 bits": GroupedForm(3, 16, 256, has_minima=False),
    "blocks of 2 bits with minima": GroupedForm(2, 16, 256, has_minima=True),
    "blocks of 8 bits": GroupedForm(8, 16, 256, has_minima=False),
    "blocks of 8 bits with minima": GroupedForm(8, 16, 256, has_minima=True),
}
INT4_FORMS = ("int4 groups of 32", "int4 groups of 128", "int4 with zeros", "int4 groups of 128 with zeros", "mxfp4")
FORMS = ("int8", *INT4_FORMS, *GROUPED)
BLOCKS = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"
)  # fmt: skip
"""The types of GGML whose blocks kernels pack."""


def group_size_of(form: str) -> int:
    return 128 if "128" in form else 32


def random_weight(form: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    rng = np.random.default_rng(seed)
    if form == "int8":
        values = rng.integers(-128, 128, (outputs, inputs))
        scales = rng.uniform(0.5e-3, 2e-3, outputs).astype(np.float32)
        return Int8Weight(torch.from_numpy(values.astype(np.int8)), torch.from_numpy(scales))
    if form in GROUPED:
        return random_grouped_weight(GROUPED[form], outputs, inputs, rng)
    groups = (outputs, inputs // group_size_of(form))
    pairs = torch.from_numpy(rng.integers(0, 256, (outputs, inputs // 2)).astype(np.uint8))
    if form == "mxfp4":
        return Mxfp4Weight(pairs, torch.from_numpy(np.ldexp(np.float32(1), rng.integers(-7, -4, groups))))
    zeros = rng.integers(0, 16, groups) if "zeros" in form else np.full(groups, 8)
    return Int4Weight(
        pairs,
        torch.from_numpy(
            (rng.uniform(0.5e-2, 2e-2, groups) * rng.choice((-1, 1), groups)).astype(np.float16).astype(np.float32)
        ),
        torch.from_numpy(zeros.astype(np.uint8)),
        group_size_of(form),
    )


def random_grouped_weight(form: GroupedForm, outputs: int, inputs: int, rng: np.random.Generator) -> GroupedWeight:
    """Scale × multiplier × value is exact in float32, as for all types of GGML."""
    kinds = form.num_factors
    largest, multipliers = 32 if form.has_multipliers else 128, (0, 16) if form.bits == 2 else (-128, 128)
    blocks = (outputs, inputs // form.block_size, kinds)
    groups = (outputs, inputs // form.group_size if form.has_multipliers else 0, kinds)
    factors = rng.uniform(0.5e-3, 2e-3, blocks) * rng.choice((-1, 1), blocks)
    lowest = 0 if form.has_minima else -(1 << form.bits - 1)
    if form.bits == 8:
        values = rng.integers(-largest, largest, (outputs, inputs)).astype(np.int8)
    elif form.bits == 4:
        values = rng.integers(0, 256, (outputs, inputs // 2)).astype(np.uint8)
    else:
        values = rng.integers(lowest, lowest + (1 << form.bits), (outputs, inputs)).astype(np.int8)
    return GroupedWeight(
        form,
        torch.from_numpy(values),
        torch.from_numpy(factors.astype(np.float16).astype(np.float32)),
        torch.from_numpy(rng.integers(*multipliers, groups).astype(np.int8)),
    )


def exact_product(x: Tensor, weight: QuantizedWeight, group_size: int = UNIT) -> Tensor:
    """Multiply the rounded rows and the weight that the quantised one stands for, in float64."""
    return round_rows(x.float(), group_size).double() @ weight.dequantize().double().T


def multiply_each(
    make: MakeOps, batches: Sequence[Tensor], weight: QuantizedWeight, *more: int
) -> list[NDArray[np.float32]]:
    """The products of batches, one after the other, with one packed weight."""
    outputs, inputs = weight.shape
    harness = OpsHarness(make(replace(BASE, hidden_size=inputs, vocab_size=outputs), batches[0].dtype, *more))
    packed = harness.ops.pack_linear(weight, None)
    products = []
    for x in batches:
        harness.begin(len(x))
        products.append(harness.ops.logits(harness.put("_hidden", x), packed).copy())
    harness.ops.close()
    return products


def multiply(make: MakeOps, x: Tensor, weight: QuantizedWeight, *more: int) -> NDArray[np.float32]:
    return multiply_each(make, [x], weight, *more)[0]


def check_products(make: MakeOps, x: Tensor, weight: QuantizedWeight) -> None:
    """The product is exact, and each row's the same bits with any number of rows."""
    together, *parts = multiply_each(make, [x, *(x[:num_rows] for num_rows in (1, 2, 3, 5, 11, 17))], weight)
    assert_close(torch.from_numpy(together), exact_product(x, weight), FP32, 1e-6)
    for part in parts:
        np.testing.assert_array_equal(part, together[: len(part)])


def random_blocks(name: str, outputs: int) -> BlockWeight:
    blocks = BLOCK_TYPES[name]
    content = np.random.default_rng(outputs).integers(0, 256, (outputs, 3 * blocks.num_bytes), dtype=np.uint8)
    content &= 0xBB  # no infinite scale has this bit clear
    if name == "MXFP4":
        content[:, :: blocks.num_bytes] = 104 + content[:, :: blocks.num_bytes] % 40
        content[0] &= 0x88  # zeros, whatever the scale
    weight = GgmlMatrix(name).pack({"weight": torch.from_numpy(content)}, (outputs, 3 * blocks.values))
    assert isinstance(weight, BlockWeight)
    return weight


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_ggml_are_packed_like_their_numbers(name: str, make_kernels: MakeOps) -> None:
    """Byte for byte: outputs that fill no panel, gated ones, and in parts. `test_ggml_blocks` has the numbers."""
    ops = make_kernels(BASE, BF16)
    in_parts = StackedWeight((random_blocks(name, 64), random_blocks(name, 100)))
    for weight, is_gated in ((random_blocks(name, 99), False), (random_blocks(name, 74), True), (in_parts, False)):
        packed = ops.pack_linear(weight, None, is_gated=is_gated)
        assert np.array_equal(packed.weight, ops.pack_linear(decoded(weight), None, is_gated=is_gated).weight)
    ops.close()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("inputs", [2, 30, 64, 100, 1160])
def test_int8_product_matches_float64(inputs: int, dtype: torch.dtype, make_kernels: MakeOps) -> None:
    """For widths that do not fill units, panels or tiles."""
    check_products(make_kernels, randn(40, inputs, dtype=dtype, seed=1), random_weight("int8", 100, inputs))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", INT4_FORMS)
def test_int4_product_matches_float64(form: str, dtype: torch.dtype, make_kernels: MakeOps) -> None:
    for inputs in (32, 96, 640) if group_size_of(form) == 32 else (128, 640):
        check_products(make_kernels, randn(40, inputs, dtype=dtype, seed=1), random_weight(form, 100, inputs))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", GROUPED)
def test_grouped_product_matches_float64(form: str, dtype: torch.dtype, make_kernels: MakeOps) -> None:
    inputs = 2 * GROUPED[form].block_size + (GROUPED[form].block_size == 32) * 32
    check_products(make_kernels, randn(40, inputs, dtype=dtype, seed=1), random_weight(form, 100, inputs))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_rows", [1, 7, 300])
@pytest.mark.parametrize("form", ["int8", "int4 with zeros", "grouped 4 bits with minima"])
def test_each_linear_adds_its_bias_and_writes_its_output(
    form: str, num_rows: int, dtype: torch.dtype, make_kernels: MakeOps
) -> None:
    """With more rows than the kernels handle at once."""
    hidden, intermediate = 96, 160
    harness = OpsHarness(make_kernels(replace(BASE, hidden_size=hidden, intermediate_size=intermediate), dtype))
    harness.begin(num_rows)
    ops, x = harness.ops, randn(num_rows, hidden, dtype=dtype, seed=1)
    weight, bias = random_weight(form, 256, hidden, 2), randn(256, seed=3)
    found = ops.linear(harness.put("_hidden", x), ops.pack_linear(weight, bias))
    assert_close(harness.get("_qkv", found, num_rows), exact_product(x, weight) + bias, dtype)
    weight, bias = random_weight(form, 2 * intermediate, hidden, 4), randn(2 * intermediate, seed=5)
    gate, up = (exact_product(x, weight) + bias).chunk(2, dim=1)
    found = ops.activated_linear(harness.put("_hidden", x), ops.pack_linear(weight, bias, is_gated=True))
    assert_close(harness.get("_gated", found, num_rows), torch.nn.functional.silu(gate) * up, dtype)
    residual, y = randn(num_rows, hidden, seed=6), randn(num_rows, intermediate, dtype=dtype, seed=7)
    weight, bias = random_weight(form, hidden, intermediate, 8), randn(hidden, seed=9)
    array = harness.put("_residual", residual)
    ops.linear_add(harness.put("_gated", y), ops.pack_linear(weight, bias), array)
    assert_close(harness.get("_residual", array, num_rows), residual + exact_product(y, weight) + bias, FP32)


def test_largest_int8_sums_do_not_overflow(make_kernels: MakeOps) -> None:
    inputs = 1 << 17
    signs = torch.tensor([1, -1], dtype=torch.int8)
    values = torch.stack([signs[[0, 0]], signs[[0, 1]], signs[[1, 1]], signs[[1, 0]]]).repeat(1, inputs // 2) * 127
    weight = Int8Weight(values, torch.ones(4))
    x = torch.stack([torch.ones(inputs), -torch.ones(inputs), torch.tensor([1.0, -1.0]).repeat(inputs // 2)])
    largest = 127.0 * inputs
    expected = [[largest, 0, -largest, 0], [-largest, 0, largest, 0], [0, largest, 0, -largest]]
    for num_rows in (1, 3):
        np.testing.assert_allclose(
            multiply(make_kernels, x[:num_rows], weight), expected[:num_rows], rtol=1e-6, atol=1e-2
        )


@pytest.mark.parametrize("group_size", [32, 128])
def test_largest_int4_sums_do_not_overflow(group_size: int, make_kernels: MakeOps) -> None:
    """Sum 15 less a zero of 0, and 0 less a zero of 15, for numbers of one sign and of both."""
    inputs, groups = 256, 256 // group_size
    values = torch.tensor([0xFF, 0x00, 0x0F, 0xF0], dtype=torch.uint8)[:, None].repeat(1, inputs // 2)
    for zero in (0, 8, 15):
        zeros = torch.full((4, groups), zero, dtype=torch.uint8)
        weight = Int4Weight(values, torch.ones(4, groups), zeros, group_size)
        x = torch.stack([torch.ones(inputs), -torch.ones(inputs), torch.tensor([1.0, -1.0]).repeat(inputs // 2)])
        for rows in (x, x[1:2], x[:, torch.arange(inputs) ^ 2]):
            expected = rows.double() @ weight.dequantize().double().T
            np.testing.assert_allclose(multiply(make_kernels, rows, weight), expected, rtol=1e-6, atol=1e-2)


def test_largest_mxfp4_sums_do_not_overflow(make_kernels: MakeOps) -> None:
    """Sum values of 6 and of -6, for numbers of one sign and of both, with the largest and the smallest scale."""
    values = torch.tensor([0x77, 0xFF, 0x7F, 0xF7], dtype=torch.uint8)[:, None].repeat(1, 32)
    ones = torch.ones(64)
    rows = torch.stack([ones, -ones, torch.tensor([1.0, -1.0]).repeat(32)])
    for scale in (2.0**16, 2.0**-23):
        weight = Mxfp4Weight(values, torch.full((4, 2), scale))
        expected = rows.double() @ weight.dequantize().double().T
        np.testing.assert_allclose(multiply(make_kernels, rows, weight), expected, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_row_that_is_not_finite_makes_only_its_own_outputs_nan(form: str, make_kernels: MakeOps) -> None:
    x, weight = randn(9, 256, seed=1), random_weight(form, 70, 256)
    expected = multiply(make_kernels, x, weight)
    x[2, 5], x[4, 100], x[7, 255] = torch.nan, torch.inf, -torch.inf
    expected[[2, 4, 7]] = np.nan
    np.testing.assert_array_equal(multiply(make_kernels, x, weight), expected)
    assert np.isnan(multiply(make_kernels, x[4:5], weight)).all()


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_zeros_and_of_denormal_numbers_give_zeros(form: str, make_kernels: MakeOps) -> None:
    x = torch.zeros(3, 256)
    x[1], x[2, 3] = 1e-40, -1e-38
    np.testing.assert_array_equal(multiply(make_kernels, x, random_weight(form, 70, 256)), 0)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_lm_head_serves_as_the_embedding_table(form: str, make_kernels: MakeOps) -> None:
    ids = np.array([99, 0, 63, 64, 65, *range(30)], np.int32)
    harness = OpsHarness(make_kernels(replace(BASE, hidden_size=256), BF16), num_pages=3)
    weight, batch = random_weight(form, BASE.vocab_size, 256), replace(step_batch([0], [len(ids)], 16), input_ids=ids)
    ops = harness.ops
    found = ops.embed(ops.packed_table(weight, ops.pack_linear(weight, None)), ops.begin_step(batch, ids))
    assert torch.equal(harness.get("_residual", found, len(ids)), weight.dequantize()[ids])


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_same_bits_in_any_batch_and_on_any_number_of_threads(form: str) -> None:
    x, weight = randn(301, 768, dtype=BF16, seed=1), random_weight(form, 1000, 768)
    together = multiply(make_native_ops, x, weight, 1)
    spans = ((0, 1), (77, 79), (298, 301), (5, 22), (64, 161), (0, 301))
    for threads in (1, 3, 8):
        parts = multiply_each(make_native_ops, [x[first:last] for first, last in spans], weight, threads)
        for part, (first, last) in zip(parts, spans, strict=True):
            np.testing.assert_array_equal(part, together[first:last])
