"""GGML's block types against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.formats.matrix_format import UnreadableMatrixError
from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES, GgmlMatrix


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_of_any_bytes_are_the_numbers_of_the_gguf_package(name: str) -> None:
    """Bit for bit, but for which NaN it is."""
    blocks = BLOCK_TYPES[name]
    content = np.random.default_rng(1).integers(0, 256, (50, 4 * blocks.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(content, gguf.GGMLQuantizationType[name])
    shape = (50, 4 * blocks.values)
    found = GgmlMatrix(name).expand({"weight": torch.from_numpy(content)}, shape, slice(0, 50)).numpy()
    is_nan = np.isnan(expected)
    assert np.array_equal(is_nan, np.isnan(found))
    assert np.array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES.keys() - {"MXFP4"}))  # whose forms hold any scale
def test_packed_blocks_are_the_same_numbers(name: str) -> None:
    content = np.random.default_rng(1).integers(0, 256, (50, 4 * BLOCK_TYPES[name].num_bytes), dtype=np.uint8)
    matrix, shape = GgmlMatrix(name), (50, 4 * BLOCK_TYPES[name].values)
    parts = {"weight": torch.from_numpy(content & 0xBB)}  # no infinite scale has this bit clear
    weight = matrix.pack(parts, shape)
    assert (weight is None) == (matrix.packed_form(shape) is None)
    if weight is not None:
        assert weight.form == matrix.packed_form(shape)
        assert torch.equal(weight.dequantize(), matrix.expand(parts, shape, slice(0, 50)))


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES.keys() - {"MXFP4", "IQ1_M"}))  # whose scales are no two bytes
def test_scale_that_is_not_finite_is_refused(name: str) -> None:
    blocks = BLOCK_TYPES[name]
    for place in blocks.scale_bytes:
        for number in (np.inf, -np.inf, np.nan):
            content = np.zeros((3, 2 * blocks.num_bytes), np.uint8)
            content[1, blocks.num_bytes + place :][:2] = np.array([number], np.float16).view(np.uint8)
            with pytest.raises(UnreadableMatrixError, match="a block's scale is not finite"):
                GgmlMatrix(name).check({"weight": torch.from_numpy(content)}, (3, 2 * blocks.values))


@pytest.mark.parametrize(("exponent", "is_packed"), [(103, False), (104, True), (143, True), (144, False)])
def test_mxfp4_is_dequantised_if_the_form_does_not_hold_a_scale(exponent: int, is_packed: bool) -> None:
    content = np.zeros((2, 34), np.uint8)  # scales of zeros may be any
    content[1, 17:] = exponent
    weight = GgmlMatrix("MXFP4").pack({"weight": torch.from_numpy(content)}, (2, 64))
    assert (weight is not None) == is_packed
