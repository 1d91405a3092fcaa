"""The emulation of ptx.cuh against torch, float64 products, and the fragments that the PTX manual draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from backend.passes.decoder.cuda.launcher import Kernel
from tests.cuda_emulator import EmulatedLauncher

if TYPE_CHECKING:
    from backend.passes.decoder.cuda.launcher import Argument

EMULATED = EmulatedLauncher(kernels_dir=Path(__file__).parent)
E4M3_MAX = 448.0


def launch(
    entry: str, *arguments: Argument, num_threads: int = 32, num_blocks: int = 1, half: int = 0, shared_bytes: int = 0
) -> None:
    kernel = Kernel("ptx_wrappers.cu", entry, (("HALF", half),), num_threads, shared_bytes)
    EMULATED.launch(kernel, (num_blocks, 1, 1), *arguments)


def random_floats(count: int) -> torch.Tensor:
    """Of all sizes, and what lies next to where conversions change their ways."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (count // 2,), generator=generator).int().view(torch.float32)
    usual = torch.randn(count // 2, generator=generator) * 100
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    f16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    exact = torch.cat([e4m3, f16, bf16])
    between = (e4m3[:-1] + e4m3[1:]) / 2
    edges = torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, 1e9, float("inf"), float("-inf"), float("nan"), 65520.0])
    near = torch.cat([between, edges])
    near = torch.cat([near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(-torch.inf))])
    return torch.cat([bits, usual, exact, near])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_fragments_is_the_product_of_the_matrices(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (16, 8)))
    start = torch.randn(16, 8, generator=generator)
    result = start.clone()
    launch("multiply", a.view(torch.int16), b.view(torch.int16), result, half=int(dtype is torch.float16))
    torch.testing.assert_close(result.double(), start.double() + a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_matrices_are_loaded_as_the_manual_lays_them_out() -> None:
    matrices = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    registers = torch.full((4, 4, 32), -1, dtype=torch.int32)
    launch("load", matrices, registers)
    loaded = registers.view(torch.int16).view(4, 4, 32, 2)
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2  # thread 4 r + c has row r, columns 2 c and 2 c + 1
        plain = matrices[:, row, column : column + 2]
        transposed = matrices[:, column : column + 2, row]
        assert loaded[0, :, lane].equal(plain)
        assert loaded[1, :, lane].equal(transposed)
        assert loaded[2, :2, lane].equal(plain[:2])
        assert loaded[3, :2, lane].equal(transposed[:2])


def test_a_copy_ends_in_zeros_where_nothing_is_to_be_read() -> None:
    source = torch.arange(1, 257, dtype=torch.int32).to(torch.uint8).clamp(min=1)
    result = torch.full((2, 16, 16), 255, dtype=torch.uint8)
    launch("copy", source, result, num_threads=16, shared_bytes=256)
    read = torch.arange(16)[None, :] < torch.arange(16)[:, None]
    assert result[0].equal(source.view(16, 16))
    assert result[1].equal(source.view(16, 16) * read)


def test_a_copy_of_a_word_ends_in_zeros_too() -> None:
    source = torch.arange(1, 21, dtype=torch.uint8)
    result = torch.full((5, 4), 255, dtype=torch.uint8)
    launch("copy_words", source, result, num_threads=5, shared_bytes=20)
    assert result.equal(source.view(5, 4) * (torch.arange(4)[None, :] < torch.arange(5)[:, None]))


def expected_narrow(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As bits; every NaN is the one that the instructions make."""
    nan = x.isnan()
    bf16, f16 = (x.to(dtype).view(torch.int16).masked_fill(nan, 0x7FFF) for dtype in (torch.bfloat16, torch.float16))
    e4m3 = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(nan, 0x7F)
    return bf16, f16, e4m3


def test_floats_narrow_to_the_nearest_as_torch_has_it() -> None:
    x = random_floats(100_000)
    results = [torch.empty(len(x), dtype=dtype) for dtype in (torch.int16, torch.int16, torch.uint8)]
    launch("narrow", x, *results, np.int32(len(x)), num_threads=256, num_blocks=64)
    for result, expected in zip(results, expected_narrow(x), strict=True):
        assert result.equal(expected)


def test_pairs_narrow_as_single_floats_do_the_first_in_the_low_half() -> None:
    x = random_floats(100_000)
    x = x[: len(x) // 2 * 2]
    results = [torch.empty(len(x) // 2, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int16)]
    launch("narrow_pairs", x, *results, np.int32(len(x) // 2), num_threads=256, num_blocks=64)
    for result, expected in zip(results, expected_narrow(x), strict=True):
        assert result.view(expected.dtype).equal(expected)


def test_all_narrow_values_widen_as_torch_has_it() -> None:
    bf16, f16 = torch.empty(65536), torch.empty(65536)
    bf16_pairs, f16_pairs, e4m3_pairs = (torch.empty(65536, 2) for _ in range(3))
    launch("widen", bf16, f16, bf16_pairs, f16_pairs, e4m3_pairs, num_threads=256, num_blocks=16)
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    pairs = torch.stack([bits, ~bits], 1)
    for result, expected in (
        (bf16, bits.view(torch.bfloat16)),
        (f16, bits.view(torch.float16)),
        (bf16_pairs, pairs.view(torch.bfloat16)),
        (f16_pairs, pairs.view(torch.float16)),
        (e4m3_pairs, bits.view(torch.float8_e4m3fn).view(65536, 2)),
    ):
        torch.testing.assert_close(result, expected.float(), rtol=0, atol=0, equal_nan=True)


def test_pairs_of_fp16_are_added_and_multiplied_as_torch_does() -> None:
    a, b = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(3)).half()
    result = torch.empty(2, 64, 2, dtype=torch.float16)
    launch("reckon", a.view(torch.int32), b.view(torch.int32), result.view(torch.int32), num_threads=64)
    assert result.equal(torch.stack([a + b, a * b]))


def test_bytes_are_permuted_as_the_selector_says() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b, selector = torch.randint(0, 2**31 - 1, (3, 256), generator=generator).int().unbind()
    result = torch.empty(256, dtype=torch.int32)
    launch("permute", a, b, selector, result, num_threads=256)
    sources = torch.cat([a[:, None], b[:, None]], 1).view(torch.int8)
    nibbles = torch.stack([selector >> 4 * i & 15 for i in range(4)], 1).long()
    chosen = sources.gather(1, nibbles & 7)
    signs = (chosen < 0).to(torch.int8) * -1
    assert result.equal(torch.where(nibbles >= 8, signs, chosen).contiguous().view(torch.int32)[:, 0])


def test_approximations_are_within_a_few_units() -> None:
    x = torch.linspace(0.01, 40, 64)
    result = torch.empty(3, 64)
    launch("approximate", x, result, num_threads=64)
    exact = x.double()
    torch.testing.assert_close(
        result.double(), torch.stack([exact.exp2(), exact.log2(), 1 / exact]), rtol=1e-6, atol=1e-6
    )
