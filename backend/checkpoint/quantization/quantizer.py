"""The arithmetic of quantisation: rows of fp32 numbers to int8, int4 or FP8, block by block on all threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import GroupedWeight, Int4Weight, Int8Weight

BLOCK_VALUES = 1 << 17
"""Values that a thread quantises at a time: its arrays of this size stay in one core's cache."""
RANGE_FACTORS = (1.05, 0.98, 0.91, 0.84, 0.77, 0.7)
"""Ranges tried for a group of int4 values, relative to the range of its numbers; the least squared error wins.

A narrower range clips the largest numbers and is finer for all others. A wider one compensates for the rounded zero
point.
"""

_MAX_INT8 = 127
_MAX_INT4 = 15
_MAX_E4M3 = 448.0


class UnquantizableError(ValueError):
    """Numbers that have no quantised form. The message says what is wrong with them."""

    row = 0
    """The weight's row at which the block begins."""


def quantize(blocks: Iterable[Tensor], shape: tuple[int, int], group_size: int | None) -> Int8Weight | Int4Weight:
    """The weight of shape (outputs, inputs) whose rows arrive in blocks, fp32 [rows, inputs], in order.

    int4 in groups of group_size inputs, or int8 without one. A block may be changed. Raises UnquantizableError.
    """
    outputs, inputs = shape
    if group_size is None:
        int8 = (torch.empty(shape, dtype=torch.int8), torch.empty(outputs))
        _fill(int8, blocks, _int8_rows)
        return Int8Weight(*int8)
    groups = (outputs, inputs // group_size)
    int4 = (
        torch.empty(outputs, inputs // 2, dtype=torch.uint8),
        torch.empty(groups),
        torch.empty(groups, dtype=torch.uint8),
    )
    _fill(int4, blocks, lambda rows: _int4_rows(rows, group_size))
    return Int4Weight(*int4, group_size)


def quantize_bytes(blocks: Iterable[Tensor], shape: tuple[int, int], form: GroupedForm) -> GroupedWeight:
    """Like `quantize`, to int8 with a scale for each group of inputs, without multipliers."""
    outputs, inputs = shape
    values, factors = torch.empty(shape, dtype=torch.int8), torch.empty(outputs, inputs // form.group_size, 1)
    _fill((values, factors), blocks, lambda rows: _byte_rows(rows, form.group_size))
    return GroupedWeight(form, values, factors, torch.empty(outputs, 0, 1, dtype=torch.int8))


def quantize_to_float8(blocks: Iterable[Tensor], shape: tuple[int, int]) -> Float8Weight:
    """Like `quantize`, to E4M3 with one scale per output."""
    parts = torch.empty(shape, dtype=torch.uint8), torch.empty(shape[0], 1)
    _fill(parts, blocks, _float8_rows)
    return Float8Weight(*parts, None)


def _fill(parts: tuple[Tensor, ...], blocks: Iterable[Tensor], convert: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """Write the converted blocks to consecutive rows of the parts. Few blocks are in memory at a time."""

    @torch.inference_mode()
    def put(rows: Tensor, first: int) -> None:
        try:
            converted = convert(rows)
        except UnquantizableError as error:
            error.row = first
            raise
        for part, block in zip(parts, converted, strict=True):
            part[first : first + len(rows)] = block

    num_threads = torch.get_num_threads()
    pending: deque[Future[None]] = deque()
    # Each thread computes its block alone: operations on blocks this small gain nothing from torch's own threads.
    with ThreadPoolExecutor(num_threads, "quantizer", lambda: torch.set_num_threads(1)) as pool:
        first = 0
        for rows in blocks:
            if len(pending) > num_threads:
                pending.popleft().result()
            pending.append(pool.submit(put, rows, first))
            first += len(rows)
        for future in pending:
            future.result()


def _int8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales: the largest magnitude of each row becomes 127."""
    scales = _finite(rows.abs().amax(dim=1)) / _MAX_INT8
    # The quotient may exceed 127 slightly where the scale is denormal and so has few digits.
    values = rows.div_(_divisors(scales)[:, None]).round_().clamp_(-_MAX_INT8, _MAX_INT8)
    return values.to(torch.int8), scales


def _byte_rows(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Values and scales in binary16: the largest magnitude of each group becomes about 127."""
    groups = rows.view(len(rows), -1, group_size)
    scales = (_finite(groups.abs().amax(dim=2, keepdim=True)) / _MAX_INT8).half().float()
    if bool(scales.isinf().any()):
        raise UnquantizableError(f"has numbers up to {float(groups.abs().max()):.3g}, too large for scales in binary16")
    values = groups.div_(_divisors(scales)).round_().clamp_(-_MAX_INT8, _MAX_INT8)
    return values.view(rows.shape).to(torch.int8), scales


def _float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales: the largest magnitude of each row becomes 448."""
    scales = _finite(rows.abs().amax(dim=1, keepdim=True)) / _MAX_E4M3
    values = rows.div_(_divisors(scales)).clamp_(-_MAX_E4M3, _MAX_E4M3)  # a denormal scale has few digits
    return values.to(torch.float8_e4m3fn).view(torch.uint8), scales


def _int4_rows(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and zeros. Scales are rounded to binary16 before the values are chosen."""
    num_rows, inputs = rows.shape
    groups = rows.reshape(-1, group_size)
    # A range that includes 0 has its zero point within 0 … 15.
    lowest = groups.amin(dim=1).clamp_(max=0)
    width = _finite(groups.amax(dim=1).clamp_(min=0) - lowest)
    best = torch.full_like(width, torch.inf)
    scales, zeros, work = torch.zeros_like(width), torch.zeros_like(width), torch.empty_like(groups)
    for factor in RANGE_FACTORS:
        scale = (width * (factor / _MAX_INT4)).half().float()
        zero = lowest.mul(-factor).div_(_divisors(scale)).round_().clamp_(0, _MAX_INT4)
        _round_to_steps(groups, scale, zero, work).sub_(zero[:, None]).mul_(scale[:, None]).sub_(groups)
        error = work.square_().sum(dim=1)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    if bool(best.isinf().any()):
        raise UnquantizableError(f"has numbers up to {float(width.max()):.3g}, too large for int4's scales in binary16")
    pairs = _round_to_steps(groups, scales, zeros, work).to(torch.uint8).view(num_rows, -1, 2)
    shape = (num_rows, inputs // group_size)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4), scales.view(shape), zeros.to(torch.uint8).view(shape)


def _round_to_steps(groups: Tensor, scales: Tensor, zeros: Tensor, out: Tensor) -> Tensor:
    """The nearest of 0 … 15 for each number, written to out."""
    torch.div(groups, _divisors(scales)[:, None], out=out)
    return out.round_().add_(zeros[:, None]).clamp_(0, _MAX_INT4)


def _divisors(scales: Tensor) -> Tensor:
    """The scales, with 1 for 0: the numbers there are 0, or too small for any scale, and become 0."""
    return torch.where(scales > 0, scales, 1.0)


def _finite(magnitudes: Tensor) -> Tensor:
    if not bool(magnitudes.isfinite().all()):
        raise UnquantizableError("has numbers that are not finite")
    return magnitudes
