"""Integers of 4 and 8 bits in groups of inputs with a scale and a zero point: unpacks and converts them."""

from __future__ import annotations

from penstock.backend.checkpoint.formats.matrix_format import check_multiple
from penstock.backend.checkpoint.weight_forms.quantized_forms import PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    INT4_GROUP_SIZES,
    MAX_QUANTIZED_INPUTS,
    Int4Weight,
)
from penstock.backend.lazy_torch import Tensor, torch

WORD_BITS = 32
INTEGER_BITS = (4, 8)


def count_groups(inputs: int, group_size: int | None) -> int:
    """Return the number of groups; group_size None means that all inputs are one group.

    Raises UnreadableMatrixError if it does not divide them.
    """
    if group_size is None:
        return 1
    check_multiple("inputs", inputs, group_size, "group_size")
    return inputs // group_size


def describe(method: str, bits: int, group_size: int | None) -> str:
    """A format's description, for messages."""
    return f"{method}, {bits} bits, " + ("one group" if group_size is None else f"groups of {group_size}")


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 [n, m × word / bits] from words of 16 or 32 bits [n, m]; the lowest bits come first.

    bits is one of INTEGER_BITS.
    """
    content = as_bytes(words)
    if bits == 8:
        return content
    return torch.stack([content & 15, content >> 4], dim=-1).view(len(words), -1)


def as_bytes(words: Tensor) -> Tensor:
    """uint8 [n, bytes of a word × m] from [n, m]."""
    return words.contiguous().view(torch.uint8)


def scale_groups(values: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None = None) -> Tensor:
    """Return scale × (value - zero), float32 [n, inputs]: values [n, inputs], scales and zeros [n, groups].

    group_of is the group of each input; without it groups have consecutive inputs. Exact for values of 8 bits and
    scales of 16.
    """
    if group_of is not None:
        scales, zeros = scales[:, group_of.long()], zeros[:, group_of.long()]
    groups = values.float().view(*scales.shape, -1)
    return groups.sub_(zeros.float()[:, :, None]).mul_(scales.float()[:, :, None]).view(values.shape)


def int4_form(inputs: int, group_size: int) -> PackedForm | None:
    """The kernels' int4 form that holds groups of this size: the largest groups that divide them."""
    sizes = [size for size in INT4_GROUP_SIZES if group_size % size == 0]
    return PackedForm(max(sizes)) if sizes and inputs <= MAX_QUANTIZED_INPUTS else None


def pack_int4(pairs: Tensor, scales: Tensor, zeros: Tensor) -> Int4Weight | None:
    """Return the int4 weight with the same numbers; None if its groups, scales or zeros cannot hold them.

    pairs are uint8 [outputs, inputs / 2] as in `Int4Weight.values`; scales and zeros are [outputs, groups].
    """
    inputs = 2 * pairs.shape[1]
    group_size = inputs // scales.shape[1]
    form = int4_form(inputs, group_size)
    scales = scales.float()
    if form is None or form.group_size is None or not torch.equal(scales.half().float(), scales):
        return None
    if bool(((zeros < 0) | (zeros > 15)).any()):
        return None
    repeats = group_size // form.group_size
    return Int4Weight(
        pairs,
        scales.repeat_interleave(repeats, dim=1),
        zeros.to(torch.uint8).repeat_interleave(repeats, dim=1),
        form.group_size,
    )
