"""GGML's block types against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

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
