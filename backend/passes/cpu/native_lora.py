"""Adapters in the layout of the native kernels (kernels/linears/lora.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.backend.lazy_torch import Tensor, torch
from penstock.backend.passes.cpu.library.native_structs import MAX_ADAPTER_PARTS, Adapter, AdapterPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from penstock.backend.checkpoint.tensor_files.lora_weights import LoraWeights
    from penstock.backend.dtypes import Dtype
    from penstock.backend.passes.cpu.library.native_structs import Linear
    from penstock.backend.passes.cpu.weight_memory.native_weights import PackedLinear

_STRIP = 16
_RANKS_AT_ONCE = 4


@dataclass(slots=True)
class _Prepared:
    struct: Adapter
    tensors: list[Tensor]
    """They own the memory that the struct points to."""


class NativeAdapters:
    """Implements `LinearAdapters`. It owns the memory that the structs of linears point to; dtype is the
    activations'."""

    def __init__(self, dtype: Dtype) -> None:
        self._dtype = dtype
        self._of_linears: dict[int, tuple[ctypes.Array[Adapter], list[_Prepared | None]]] = {}
        """By the id of a packed linear, which the model keeps."""

    def prepare(self, linear: PackedLinear, parts: Sequence[LoraWeights]) -> _Prepared:
        struct = Adapter()
        return _Prepared(struct, _fill(struct, list(parts), linear.struct, self._dtype))

    def put(self, linear: PackedLinear, index: int, prepared: _Prepared | None) -> None:
        _, kept = self._of_linears.get(id(linear), (None, []))
        if prepared is None and not kept:
            return
        kept += [None] * (index + 1 - len(kept))
        kept[index] = prepared
        structs = (Adapter * len(kept))(*(Adapter() if each is None else each.struct for each in kept))
        self._of_linears[id(linear)] = structs, kept
        linear.struct.adapters = ctypes.addressof(structs)
        linear.struct.most_ranks = max(struct.num_ranks for struct in structs)


def _fill(struct: Adapter, loras: list[LoraWeights], linear: Linear, dtype: Dtype) -> list[Tensor]:
    """Return the tensors that the struct points to."""
    if any(lora.first_output % _STRIP for lora in loras):
        loras = [_joined(loras)]
    stacked = torch.cat([lora.down for lora in loras])
    down = torch.nn.functional.pad(stacked, (0, 0, 0, -len(stacked) % _RANKS_AT_ONCE)).to(dtype.in_torch).contiguous()
    struct.down, struct.num_ranks = down.data_ptr(), len(down)
    tensors, first_rank = [down], 0
    for lora in loras:
        num_ranks = len(lora.down)
        for half in _halves(lora, linear):
            if struct.num_parts == MAX_ADAPTER_PARTS:
                raise RuntimeError("a linear has more parts than the kernels know; this is a bug")
            up = _strips(half.up * linear.scale).to(dtype.in_torch).contiguous()
            struct.parts[struct.num_parts] = AdapterPart(
                up=up.data_ptr(),
                first_output=half.first_output,
                end_output=half.first_output + len(half.up),
                first_rank=first_rank,
                num_ranks=num_ranks,
            )
            struct.num_parts += 1
            tensors.append(up)
        first_rank += num_ranks
    return tensors


def _joined(loras: list[LoraWeights]) -> LoraWeights:
    """One addition instead of several: strips of outputs would have those of two."""
    up = torch.zeros(max(each.first_output + len(each.up) for each in loras), sum(len(each.down) for each in loras))
    first_rank = 0
    for each in loras:
        end_rank = first_rank + len(each.down)
        up[each.first_output : each.first_output + len(each.up), first_rank:end_rank] = each.up
        first_rank = end_rank
    return replace(loras[0], first_output=0, down=torch.cat([each.down for each in loras]), up=up)


def _halves(lora: LoraWeights, linear: Linear) -> Iterator[LoraWeights]:
    """The parts for gate and for up, which may share their `down`; a linear that is not gated has one part."""
    first, end = lora.first_output, lora.first_output + len(lora.up)
    if linear.gated and first < linear.outputs < end:
        yield replace(lora, up=lora.up[: linear.outputs - first])
        yield replace(lora, first_output=linear.outputs, up=lora.up[linear.outputs - first :])
    else:
        yield lora


def _strips(up: Tensor) -> Tensor:
    """[outputs, rank] → [strips, rank, 16]"""
    padded = torch.nn.functional.pad(up, (0, 0, 0, -len(up) % _STRIP))
    return padded.view(-1, _STRIP, up.shape[1]).transpose(1, 2)
