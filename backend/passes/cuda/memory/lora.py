"""Adapters of linears (kernels/products/lora.cu), in one block of memory, so that captured steps read any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.backend.checkpoint.tensor_files.lora_weights import ADAPTED_FIELDS, LoraWeights
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher, int32
from penstock.backend.passes.ops.interface import Linear

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter

MAX_PARTS = 4
MAX_RANKS = MAX_PARTS * 512
"""Of all parts of a linear's adapter: `lora_config.MAX_RANK` of each."""
HEADER_BYTES = 128
NUM_LAUNCHES = 2
"""Kernels that adapters add to a product."""
MAX_ADAPTERS = 512
"""Those that requests may name, and as many that were unloaded while requests use them."""
_VALUES = 8
_RANKS_AT_ONCE = 4
_TOKENS = 4
_RANK_BLOCKS = 8
"""Blocks that share the ranks of a group of tokens."""


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for act in ACT_MACRO.values():
        yield from _kernels(act)


def _kernels(act: int) -> tuple[Kernel, Kernel, Kernel]:
    """Return multiply_down, add_up and add_up_fp32."""
    macros = (("ACT", act),)
    down, up, up_fp32 = (
        Kernel("products/lora.cu", entry, macros, 128) for entry in ("multiply_down", "add_up", "add_up_fp32")
    )
    return down, up, up_fp32


def scratch_bytes(max_tokens: int, num_linears: int) -> int:
    """Memory of the sums by rank, and of where the adapters of linears are."""
    return 4 * max_tokens * MAX_RANKS + 8 * num_linears * MAX_ADAPTERS


def adapter_bytes(adapter: PeftAdapter, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Upper bound of an adapter's memory: numbers, headers, and what fills up small linears or joins gates."""
    gates = 0 if config.delta_net is None else 4 * config.delta_net.num_value_heads * dtype.itemsize
    of_layer = len(ADAPTED_FIELDS) * 1024 + (64 + gates) * adapter.rank
    return adapter.num_values * dtype.itemsize + config.num_layers * of_layer


@dataclass(eq=False, slots=True)
class _Part:
    """The bytes of a linear's adapter."""

    places: Tensor
    index: int
    begin: int
    num_bytes: int


class CudaAdapters:
    """Implements `LinearAdapters`. Only the pass's thread uses it, except `prepare`."""

    def __init__(
        self, launcher: Launcher, torch_device: torch.device, dtype: torch.dtype, max_tokens: int, num_bytes: int
    ) -> None:
        """num_bytes: of all adapters at a time. dtype is the activations'."""
        self._launcher, self._device, self._dtype = launcher, torch_device, dtype
        self.kernels = self._down, self._up, self._up_fp32 = _kernels(ACT_MACRO[dtype])
        """The kernels to pass to `Launcher.prepare`."""
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=torch_device)
        self._ranks = torch.zeros(max_tokens, MAX_RANKS, device=torch_device)
        self._places: dict[int, Tensor] = {}
        """By the id of a linear, which the model keeps: int64 [adapters], where its part begins in memory, or -1."""
        self._parts: list[_Part] = []
        """Ascending."""

    def open(self, linears: Sequence[Linear]) -> None:
        """Let the linears have adapters, before a step is captured."""
        shape = len(linears), MAX_ADAPTERS
        places = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        self._places = dict(zip(map(id, linears), places, strict=True))

    def prepare(self, linear: Linear, parts: Sequence[LoraWeights]) -> Tensor:
        """uint8 on the host"""
        if any(lora.first_output % _VALUES or len(lora.up) % _VALUES for lora in parts):
            parts = [_joined(parts)]
        if len(parts) > MAX_PARTS:
            raise RuntimeError(f"a linear has {len(parts)} parts; the kernels have {MAX_PARTS}; this is a bug")
        down = torch.cat([lora.down for lora in parts])
        numbers = [torch.nn.functional.pad(down, (0, 0, 0, -len(down) % _RANKS_AT_ONCE)).flatten()]
        header, first_rank = [len(down), len(parts)], 0
        for lora in parts:
            outputs, num_ranks = lora.up.shape
            header += [lora.first_output, outputs, first_rank, num_ranks, sum(map(len, numbers))]
            up = torch.nn.functional.pad(linear.scale * lora.up, (0, 0, 0, -outputs % _VALUES))
            numbers.append(up.t().flatten())
            first_rank += num_ranks
        padded = torch.tensor(header + [0] * (HEADER_BYTES // 4 - len(header)), dtype=torch.int32)
        return torch.cat([padded.view(torch.uint8), torch.cat(numbers).to(self._dtype).view(torch.uint8)])

    def put(self, linear: Linear, index: int, prepared: Tensor | None) -> None:
        """Steps in flight keep what they read: changes run in the stream, behind them."""
        places = self._places[id(linear)]
        kept = [part for part in self._parts if part.places is not places or part.index != index]
        if len(kept) < len(self._parts):
            self._parts = kept
            places[index : index + 1].fill_(-1)
        if prepared is None:
            return
        if index >= MAX_ADAPTERS:
            raise RuntimeError(f"an adapter has index {index}; the kernels have {MAX_ADAPTERS}")
        part = _Part(places, index, self._end, len(prepared))
        if part.begin + part.num_bytes > len(self._memory):
            self._close_gaps()
            part.begin = self._end
        self._memory[part.begin : part.begin + part.num_bytes].copy_(prepared)
        self._point(part)
        self._parts.append(part)

    @property
    def _end(self) -> int:
        return -(-(self._parts[-1].begin + self._parts[-1].num_bytes) // 16) * 16 if self._parts else 0

    def _close_gaps(self) -> None:
        moved, self._parts = self._parts, []
        for part in moved:
            begin, end = self._end, part.begin + part.num_bytes
            if begin != part.begin:
                self._memory[begin : begin + part.num_bytes].copy_(self._memory[part.begin : end].clone())
                part.begin = begin
                self._point(part)
            self._parts.append(part)

    def _point(self, part: _Part) -> None:
        part.places[part.index : part.index + 1].fill_(part.begin)

    def add(self, x: Tensor, linear: Linear, out: Tensor, adapters: Tensor) -> None:
        """Add to out [T, outputs] what the tokens' adapters add for x [T, inputs]; adapters: int32 [T], -1 for none."""
        places = self._places.get(id(linear))
        if places is None:
            return
        (num_tokens, inputs), outputs = x.shape, out.shape[1]
        kernel = self._up if out.dtype == self._dtype else self._up_fp32
        groups, stride = -(-num_tokens // _TOKENS), int32(MAX_RANKS)
        launch, tokens = self._launcher.launch, int32(num_tokens)
        arrays = self._memory, places, adapters
        launch(self._down, (groups, _RANK_BLOCKS, 1), x, *arrays, self._ranks, tokens, int32(inputs), stride)
        columns = -(-outputs // (_VALUES * kernel.num_threads))
        launch(kernel, (columns, groups, 1), self._ranks, *arrays, out, tokens, int32(outputs), stride)


def _joined(loras: Sequence[LoraWeights]) -> LoraWeights:
    """One addition instead of several: 8 outputs would have those of two."""
    first = min(each.first_output for each in loras) // _VALUES * _VALUES
    ends = [each.first_output + len(each.up) for each in loras]
    up, first_rank = torch.zeros(max(ends) - first, sum(len(each.down) for each in loras)), 0
    for each, end in zip(loras, ends, strict=True):
        end_rank = first_rank + len(each.down)
        up[each.first_output - first : end - first, first_rank:end_rank] = each.up
        first_rank = end_rank
    return replace(loras[0], first_output=first, down=torch.cat([each.down for each in loras]), up=up)
