"""Checks each wrapper of inline PTX (common/ptx.cuh, hopper.cuh) against torch, float64, and the PTX manual's layouts.

On the emulator this checks the wrapper's emulated version; on a GPU, that the instruction does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from penstock.backend.passes.cuda.device.launcher import BOX_COLUMNS, Argument, Kernel, Launcher, TensorMap
from penstock.tools.gpu.cases.check import require_close, require_same_bits

SOURCE = Path(__file__).with_name("ptx_wrappers.cu")
HOPPER_SOURCE = Path(__file__).with_name("hopper_wrappers.cu")
_E4M3_MAX = 448.0
_BOX_ROW_BYTES = 2 * BOX_COLUMNS


def wrapper_kernel(entry: str, num_threads: int = 32, *, half: int = 0, shared_bytes: int = 0) -> Kernel:
    return Kernel(str(SOURCE), entry, (("HALF", half),), num_threads, shared_bytes)


def check_product(launcher: Launcher, dtype: torch.dtype) -> None:
    """Check that multiplying fragments multiplies the matrices."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (16, 8)))
    start = torch.randn(16, 8, generator=generator)
    result = start.clone()
    kernel = wrapper_kernel("multiply", half=int(dtype is torch.float16))
    _launch(launcher, kernel, 1, a.view(torch.int16), b.view(torch.int16), result)
    require_close("mma.m16n8k16", result, start.double() + a.double() @ b.double(), 1e-5, 1e-5)


def check_matrix_loads(launcher: Launcher) -> None:
    """Check that thread 4 r + c receives row r, columns 2 c and 2 c + 1, of each matrix or of its transpose."""
    matrices = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    registers = torch.full((2, 4, 32), -1, dtype=torch.int32)
    _launch(launcher, wrapper_kernel("load"), 1, matrices, registers)
    loaded = registers.view(torch.int16).view(2, 4, 32, 2)
    plain = matrices.reshape(4, 32, 2)
    transposed = matrices.transpose(1, 2).reshape(4, 32, 2)
    for found, (form, expected) in zip(loaded, {"x4": plain, "x4.trans": transposed}.items(), strict=True):
        require_same_bits(f"ldmatrix.{form}", found, expected)


def check_copies(launcher: Launcher) -> None:
    """Check that a copy writes zeros after the bytes it reads."""
    source = torch.arange(1, 257, dtype=torch.int32).to(torch.uint8).clamp(min=1)
    result = torch.full((16, 16), 255, dtype=torch.uint8)
    _launch(launcher, wrapper_kernel("copy", 16, shared_bytes=256), 1, source, result)
    read = torch.arange(16)[None, :] < torch.arange(16)[:, None]
    require_same_bits("cp.async of 16 bytes", result, source.view(16, 16) * read)


def check_word_copies(launcher: Launcher) -> None:
    source = torch.arange(1, 21, dtype=torch.uint8)
    result = torch.full((5, 4), 255, dtype=torch.uint8)
    _launch(launcher, wrapper_kernel("copy_words", 5, shared_bytes=20), 1, source, result)
    read = torch.arange(4)[None, :] < torch.arange(5)[:, None]
    require_same_bits("cp.async of 4 bytes", result, source.view(5, 4) * read)


def check_narrowing(launcher: Launcher) -> None:
    """Check that floats of all sizes round to the nearest value, as in torch."""
    x = _random_floats(100_000)
    results = [torch.empty(len(x), dtype=dtype) for dtype in (torch.int16, torch.int16, torch.uint8)]
    _launch(launcher, wrapper_kernel("narrow", 256), 64, x, *results, np.int32(len(x)))
    for name, result, expected in zip(("bf16", "f16", "e4m3"), results, _expected_narrow(x), strict=True):
        require_same_bits(f"cvt to {name}", result, expected)


def check_narrowing_of_pairs(launcher: Launcher) -> None:
    """Check that pairs round like single floats, with the first one in the low half."""
    x = _random_floats(100_000)
    x = x[: len(x) // 2 * 2]
    results = [torch.empty(len(x) // 2, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int16)]
    _launch(launcher, wrapper_kernel("narrow_pairs", 256), 64, x, *results, np.int32(len(x) // 2))
    for name, result, expected in zip(("bf16x2", "f16x2", "e4m3x2"), results, _expected_narrow(x), strict=True):
        require_same_bits(f"cvt to {name}", result, expected)


def check_widening(launcher: Launcher) -> None:
    """Check all 16-bit values as fp16 and as e4m3 pairs. Every e4m3 value is also an fp16 value."""
    f16, e4m3_pairs = torch.empty(65536), torch.empty(65536, dtype=torch.int32)
    _launch(launcher, wrapper_kernel("widen", 256), 16, f16, e4m3_pairs)
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    require_close("f16 to float", f16, bits.view(torch.float16).float(), 0, 1e-300)
    found = e4m3_pairs.view(torch.float16).view(65536, 2).float()
    require_close("e4m3x2 to f16x2", found, bits.view(torch.float8_e4m3fn).view(65536, 2).float(), 0, 1e-300)


def check_pair_arithmetic(launcher: Launcher) -> None:
    a, b = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(3)).half()
    # As bf16: subnormal numbers times 2^126.
    a.view(torch.int16)[:8, 0] = torch.arange(8, dtype=torch.int16) << 4
    b.view(torch.int16)[:8, 0] = 0x7E80
    result = torch.empty(4, 64, 2, dtype=torch.float16)
    _launch(
        launcher, wrapper_kernel("reckon", 64), 1, a.view(torch.int32), b.view(torch.int32), result.view(torch.int32)
    )
    normal = slice(8, None)  # what is subnormal in bf16 has a NaN beside it in fp16
    require_same_bits("add.f16x2 and mul.f16x2", result[:2, normal], torch.stack([a + b, a * b])[:, normal])
    low, high = a.view(torch.bfloat16), b.view(torch.bfloat16)
    same = torch.stack([low + high, low * high]).view(torch.float16)
    require_same_bits("fma.bf16x2", result[2:], same)


def check_permutation(launcher: Launcher) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b, selector = torch.randint(0, 2**31 - 1, (3, 256), generator=generator).int().unbind()
    result = torch.empty(256, dtype=torch.int32)
    _launch(launcher, wrapper_kernel("permute", 256), 1, a, b, selector, result)
    sources = torch.cat([a[:, None], b[:, None]], 1).view(torch.int8)
    nibbles = torch.stack([selector >> 4 * i & 15 for i in range(4)], 1).long()
    chosen = sources.gather(1, nibbles & 7)
    signs = (chosen < 0).to(torch.int8) * -1
    expected = torch.where(nibbles >= 8, signs, chosen).contiguous().view(torch.int32)[:, 0]
    require_same_bits("prmt", result, expected)


def check_maximum(launcher: Launcher) -> None:
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    a[:4] = torch.tensor([torch.nan, 1.0, torch.nan, -torch.inf])
    b[:4] = torch.tensor([1.0, torch.nan, torch.nan, -torch.inf])
    result = torch.empty(64)
    _launch(launcher, wrapper_kernel("choose_larger", 64), 1, a, b, result)
    require_close("max.NaN", result, torch.maximum(a, b), 0, 1e-300)


def check_approximations(launcher: Launcher) -> None:
    x = torch.linspace(0.01, 40, 64)
    result = torch.empty(3, 64)
    _launch(launcher, wrapper_kernel("approximate", 64), 1, x, result)
    exact = x.double()
    require_close("ex2, lg2, rcp", result, torch.stack([exact.exp2(), exact.log2(), 1 / exact]), 1e-6, 1e-6)
    # Masked keys must not change a row's sums: they scale them by 2^0 and have the weight 2^-inf. Both must be exact.
    _launch(launcher, wrapper_kernel("approximate", 64), 1, torch.tensor([0.0, -torch.inf] * 32), result)
    require_same_bits("ex2 of 0 and of -infinity", result[0, :2], torch.tensor([1.0, 0.0]))


def hopper_kernel(entry: str, shared_bytes: int) -> Kernel:
    return Kernel(str(HOPPER_SOURCE), entry, (), 128, shared_bytes, needs_wgmma=True)


def check_product_from_shared(launcher: Launcher, columns: int) -> None:
    """Check that the product is added to the accumulators, or replaces them."""
    a, b = _random_bf16(64, 16), _random_bf16(columns, 16)
    start = torch.randn(64, columns, generator=torch.Generator().manual_seed(1))
    result = start.clone()
    kernel = hopper_kernel(f"multiply_shared_{columns}", (64 + columns) * _BOX_ROW_BYTES)
    _launch(launcher, kernel, 1, a.view(torch.int16), b.view(torch.int16), result)
    require_close(f"wgmma.m64n{columns}k16", result, start.double() + 2 * a.double() @ b.double().T, 1e-5, 1e-5)


def check_product_by_rows(launcher: Launcher, columns: int) -> None:
    """Check two products in a row on the same accumulators, with a in registers and b by rows."""
    a, b, result = _random_bf16(64, 32), _random_bf16(32, columns), torch.full((64, columns), torch.nan)
    kernel = hopper_kernel(f"multiply_{columns}", 32 * _BOX_ROW_BYTES * -(-columns // BOX_COLUMNS))
    _launch(launcher, kernel, 1, a.view(torch.int16), b.view(torch.int16), result)
    require_close(f"wgmma.m64n{columns}k16", result, a.double() @ b.double(), 1e-5, 1e-5)


def check_box(launcher: Launcher, row: int, column: int) -> None:
    """Check that chunk c of a box's row r is at c xor r % 8, and that numbers outside the matrix are 0."""
    rows, columns, box_rows = 40, 128, 32
    matrix = _random_bf16(rows, columns)
    result = torch.full((3, box_rows * _BOX_ROW_BYTES), 255, dtype=torch.uint8)
    kernel = hopper_kernel("copy", box_rows * _BOX_ROW_BYTES + 16)
    tensor_map = TensorMap(matrix.view(torch.uint8).view(-1), columns, box_rows)
    _launch(launcher, kernel, 1, tensor_map, result, np.int32(row), np.int32(column), np.int32(box_rows))
    padded = torch.zeros(rows + 2 * box_rows, columns + BOX_COLUMNS, dtype=torch.bfloat16)
    padded[box_rows : box_rows + rows, :columns] = matrix
    box = padded[box_rows + row : 2 * box_rows + row, column : column + BOX_COLUMNS]
    chunks = box.contiguous().view(torch.uint8).view(box_rows, 8, 16)
    places = torch.arange(8) ^ (torch.arange(box_rows) % 8)[:, None]
    swizzled = chunks.gather(1, places[:, :, None].expand(-1, -1, 16))  # xor is its own inverse
    require_same_bits("cp.async.bulk.tensor", result, swizzled.reshape(1, -1).expand(3, -1))


def check_turns(launcher: Launcher) -> None:
    order = torch.full((8,), -1, dtype=torch.int32)
    _launch(launcher, hopper_kernel("take_turns", 4), 1, order)
    require_same_bits("bar.arrive", order, torch.arange(4, dtype=torch.int32).repeat(2))


WRAPPERS: dict[str, Callable[[Launcher], None]] = {
    "mma.bf16": partial(check_product, dtype=torch.bfloat16),
    "mma.f16": partial(check_product, dtype=torch.float16),
    "ldmatrix": check_matrix_loads,
    "cp.async.16": check_copies,
    "cp.async.4": check_word_copies,
    "cvt.narrow": check_narrowing,
    "cvt.narrow_pairs": check_narrowing_of_pairs,
    "cvt.widen": check_widening,
    "f16x2": check_pair_arithmetic,
    "prmt": check_permutation,
    "max.NaN": check_maximum,
    "approximations": check_approximations,
}


HOPPER_WRAPPERS: dict[str, Callable[[Launcher], None]] = {
    **{f"wgmma.shared.{n}": partial(check_product_from_shared, columns=n) for n in (64, 128)},
    **{f"wgmma.rows.{n}": partial(check_product_by_rows, columns=n) for n in (64, 80, 96, 128)},
    "turns": check_turns,
    "box": partial(check_box, row=5, column=64),
    "box.first_rows": partial(check_box, row=-3, column=0),
    "box.last_rows": partial(check_box, row=30, column=96),
}
"""Of compute capability 9.0 alone. setmaxnreg changes no result; the attention kernel has it."""


def _launch(launcher: Launcher, kernel: Kernel, num_blocks: int, *arguments: Argument) -> None:
    launcher.prepare([kernel])
    launcher.launch(kernel, (num_blocks, 1, 1), *arguments)


def _random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _random_floats(count: int) -> torch.Tensor:
    """Floats of all sizes, and the neighbours of the points where a conversion's result changes."""
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


def _expected_narrow(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expected bits; every NaN is the one that the instructions produce."""
    nan = x.isnan()
    bf16, f16 = (x.to(dtype).view(torch.int16).masked_fill(nan, 0x7FFF) for dtype in (torch.bfloat16, torch.float16))
    e4m3 = x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(nan, 0x7F)
    return bf16, f16, e4m3
