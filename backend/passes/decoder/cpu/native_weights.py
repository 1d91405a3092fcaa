"""Weights in the packed layout of the native kernels, in memory of huge pages."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.backend.checkpoint.quantized_weights import Int4Weight, Int8Weight
from penstock.backend.passes.decoder.cpu.native_structs import Experts, Linear, WeightForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.decoder_config import Experts as ExpertSettings
    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight
    from penstock.backend.passes.decoder.ops import ExpertWeights

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A struct for the kernels, its address, and the tensors that it points to."""

    address: int
    struct: Linear
    weight: Tensor
    """uint8: the bytes of the packed form."""
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Rows for the kernels: row-major at the address, or outputs of the packed linear whose struct is there."""

    address: int
    is_packed: bool
    owner: Tensor | PackedLinear

    @staticmethod
    def of_packed(linear: PackedLinear) -> EmbeddingTable:
        return EmbeddingTable(linear.address, True, linear)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A struct for the kernels, its address, the router, and the tensors that the struct points to."""

    address: int
    struct: Experts
    router: PackedLinear
    weights: tuple[Tensor, Tensor]
    """uint8 [experts, bytes]: gate and up, and down."""


class WeightPacker:
    """Packs weights for the kernels of one engine. dtype is that of weights: float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL, engine: int | None, dtype: torch.dtype) -> None:
        self._library = library
        self._engine = engine
        self._dtype = dtype
        self._arena = _HugePageArena()
        self.linear_bytes = 0
        """Of all packed linears: what a step of one row reads."""

    def memory(self) -> list[Tensor]:
        """All packed weights and tables, as uint8: views of the memory in which they lie."""
        return self._arena.used()

    def pack(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float, *, is_gated: bool
    ) -> PackedLinear:
        outputs, inputs = weight.shape
        bias = None if bias is None else bias.float().contiguous()
        struct = Linear(
            bias=None if bias is None else bias.data_ptr(),
            inputs=inputs,
            outputs=outputs // (1 + is_gated),
            gated=is_gated,
            scale=scale,
        )
        match weight:
            case Int8Weight(values, scales):
                struct.form = WeightForm.INT8
                packed = self._fill(struct, self._library.ps_pack_int8, values, scales)
            case Int4Weight(values, scales, zeros, group_size):
                struct.form, struct.group_size = WeightForm.INT4, group_size
                struct.has_zeros = bool((zeros != 8).any())
                packed = self._fill(struct, self._library.ps_pack_int4, values, scales, zeros)
            case Tensor():
                packed = self._fill(struct, self._library.ps_pack, weight.to(self._dtype))
        return PackedLinear(ctypes.addressof(struct), struct, packed, bias)

    def pack_experts(self, weights: ExpertWeights, settings: ExpertSettings, scale: float) -> PackedExperts:
        hidden = weights.router.shape[1]
        gate_up = Linear(inputs=hidden, outputs=settings.width, gated=True, scale=1.0)
        down = Linear(inputs=settings.width, outputs=hidden, scale=scale)
        packed = (
            self._fill_experts(gate_up, weights.gate_up, settings),
            self._fill_experts(down, weights.down, settings),
        )
        struct = Experts(
            gate_up=gate_up,
            down=down,
            gate_up_bytes=packed[0].shape[1],
            down_bytes=packed[1].shape[1],
            count=settings.count,
            per_token=settings.per_token,
            normalises=settings.normalises,
        )
        router = self.pack(weights.router, None, 1.0, is_gated=False)
        return PackedExperts(ctypes.addressof(struct), struct, router, packed)

    def _fill_experts(self, struct: Linear, weights: Tensor, settings: ExpertSettings) -> Tensor:
        """struct becomes that of the first expert."""
        num_bytes = self._library.ps_packed_bytes(self._engine, ctypes.byref(struct))
        packed = self._arena.empty(settings.count * num_bytes, torch.uint8).view(settings.count, num_bytes)
        self.linear_bytes += settings.per_token * num_bytes
        for target, weight in zip(packed, weights.chunk(settings.count), strict=True):
            struct.packed = target.data_ptr()
            rows = weight.to(self._dtype).contiguous()
            self._library.ps_pack(self._engine, ctypes.byref(struct), rows.data_ptr())
        struct.packed = packed.data_ptr()
        return packed

    def _fill(self, struct: Linear, pack: Callable[..., None], *tensors: Tensor) -> Tensor:
        """Allocate the packed weight and fill it from the tensors."""
        num_bytes = self._library.ps_packed_bytes(self._engine, ctypes.byref(struct))
        packed = self._arena.empty(num_bytes, torch.uint8)
        self.linear_bytes += num_bytes
        struct.packed = packed.data_ptr()
        rows = [tensor.contiguous() for tensor in tensors]
        pack(self._engine, ctypes.byref(struct), *(tensor.data_ptr() for tensor in rows))
        return packed

    def read_memory(self, memory: Tensor) -> float:
        """Return the sum of fp32 memory, a multiple of 128 numbers. The threads read it as fast as they can."""
        total: float = self._library.ps_read_memory(self._engine, memory.data_ptr(), memory.numel())
        return total

    def table(self, weight: Tensor) -> EmbeddingTable:
        rows = self._arena.empty(weight.numel(), self._dtype).view(weight.shape).copy_(weight)
        return EmbeddingTable(rows.data_ptr(), False, rows)


class _HugePageArena:
    """Memory for weights in mappings of huge pages. With 4 KB pages, address translation limits how fast a step reads
    the weights. Single tensors are never freed; each keeps its mapping alive."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0
        self._full: list[Tensor] = []

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_elements * dtype.itemsize
        if self._chunk is None or self._used_bytes + num_bytes > len(self._chunk):
            self._full = self.used()
            self._chunk = map_memory(max(num_bytes, _CHUNK_BYTES))
            self._used_bytes = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=num_elements, offset=self._used_bytes)
        self._used_bytes += -(-num_bytes // 64) * 64
        return tensor

    def used(self) -> list[Tensor]:
        """Return the used part of each mapping, as uint8."""
        if self._chunk is None:
            return []
        return [*self._full, torch.frombuffer(self._chunk, dtype=torch.uint8, count=self._used_bytes)]


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map zeroed anonymous memory, in huge pages where the system has them; it becomes resident when written."""
    # Private, because shared anonymous memory, the default of mmap, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
