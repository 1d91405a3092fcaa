"""Weights in the packed layout of the native kernels."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import Experts as ExpertSettings
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    BlockWeight,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
    SimpleWeight,
    StackedWeight,
)
from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
from penstock.backend.dtypes import Dtype
from penstock.backend.lazy_torch import Tensor, torch
from penstock.backend.passes.cpu.library.native_structs import (
    PANEL,
    Codebook,
    Experts,
    Linear,
    Minima,
    Packing,
)
from penstock.backend.passes.cpu.weight_memory.anonymous import AnonymousMemory, WeightMemory
from penstock.backend.passes.ops.interface import ExpertWeights


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A struct for the kernels, its address, and the arrays that it points to."""

    address: int
    struct: Linear
    weight: NDArray[np.uint8]
    """The bytes of the packed form."""
    bias: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Rows for the kernels: row-major at the address, or outputs of the packed linear whose struct is there."""

    address: int
    is_packed: bool
    owner: NDArray[Any] | PackedLinear

    @staticmethod
    def of_packed(linear: PackedLinear) -> EmbeddingTable:
        return EmbeddingTable(linear.address, True, linear)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A struct for the kernels, its address, the router, and the arrays that the struct points to."""

    address: int
    struct: Experts
    router: PackedLinear
    weights: tuple[NDArray[np.uint8], ...]
    """[experts, bytes]: gate and up, and down."""
    biases: tuple[NDArray[np.float32] | None, ...]
    """float32 biases of gate and up, and of down, and factors, as in `ExpertWeights`."""


class WeightPacker:
    """Packs weights for the kernels of one engine. dtype is that of weights: float32 or bfloat16.

    If the memory is already filled, it only reads how the weights are packed: then a `PackedShape` stands for each.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        engine: int | None,
        dtype: Dtype,
        memory: WeightMemory | None = None,
        *,
        rounds_rows: bool = False,
    ) -> None:
        """rounds_rows: whether products with int8 weights have one scale for each row of activations."""
        self._library = library
        self._rounds_rows = rounds_rows
        self._engine = engine
        self._dtype = dtype
        self._memory = AnonymousMemory() if memory is None else memory
        self.linear_bytes = 0
        """Size of all packed linears, which a step of one row reads."""

    def memory(self) -> list[NDArray[np.uint8]]:
        """All packed weights and tables, as uint8: views of the memory in which they lie."""
        return self._memory.used()

    def pack(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float, *, is_gated: bool
    ) -> PackedLinear:
        outputs, inputs = weight.shape
        vector = self._bias(bias)
        struct = Linear(
            bias=_address(vector),
            inputs=inputs,
            outputs=outputs // (1 + is_gated),
            gated=is_gated,
            scale=scale,
        )
        packed = self._fill(struct, weight)
        return PackedLinear(ctypes.addressof(struct), struct, packed[0], vector)

    def pack_experts(self, weights: ExpertWeights, settings: ExpertSettings, scale: float) -> PackedExperts:
        hidden = weights.router.shape[1]
        biases = tuple(map(self._bias, (weights.gate_up_bias, weights.down_bias, weights.factors)))
        gate_up = Linear(inputs=hidden, outputs=settings.width, gated=True, scale=1.0, bias=_address(biases[0]))
        down = Linear(inputs=settings.width, outputs=hidden, scale=scale, bias=_address(biases[1]))
        packed = tuple(
            self._fill(linear, weight, settings.count, settings.per_token)
            for linear, weight in ((gate_up, weights.gate_up), (down, weights.down))
        )
        struct = Experts(
            gate_up=gate_up,
            down=down,
            gate_up_bytes=packed[0].shape[1],
            down_bytes=packed[1].shape[1],
            count=settings.count,
            per_token=settings.per_token,
            normalises=settings.normalises,
            factors=_address(biases[2]),
        )
        router = self.pack(weights.router, weights.router_bias, 1.0, is_gated=False)
        return PackedExperts(ctypes.addressof(struct), struct, router, packed, biases)

    def _fill(
        self, struct: Linear, weight: Tensor | QuantizedWeight, count: int = 1, num_read: int = 1
    ) -> NDArray[np.uint8]:
        """Pack count linears, one after the other. A row reads num_read of them. struct describes the first."""
        self._memory.give_form_to(struct)
        parts = [] if self._memory.is_filled else self._describe(struct, weight, count)
        num_bytes = self._library.ps_packed_bytes(self._engine, ctypes.byref(struct))
        packed = self._memory.place(count * num_bytes, struct).reshape(count, num_bytes)
        self.linear_bytes += num_read * num_bytes
        for index, target in enumerate(packed):
            self._point_parts(struct, target.ctypes.data)
            for number, part in enumerate(parts):
                rows = part.shape[0] // count
                self._pack_part(struct, number, _rows(part, slice(index * rows, (index + 1) * rows)))
        self._point_parts(struct, packed.ctypes.data)
        return packed

    def _describe(self, struct: Linear, weight: Tensor | QuantizedWeight, count: int) -> list[Tensor | QuantizedWeight]:
        """Set the struct's parts but not where they lie, and return the weight of each part."""
        parts: list[Tensor | QuantizedWeight] = [weight]
        if isinstance(weight, StackedWeight):
            parts = [*weight.weights]
        struct.num_parts, end, width = len(parts), 0, PANEL >> struct.gated
        for place, part in zip(struct.parts, parts, strict=False):
            end += part.shape[0] // count >> struct.gated
            place.end_panel = -(-end // width)
            place.packing = _packing_of(part)
        struct.scales_whole_rows = self._rounds_rows and all(isinstance(part, Int8Weight) for part in parts)
        return parts

    def _point_parts(self, struct: Linear, address: int) -> None:
        for number in range(struct.num_parts):
            struct.parts[number].packed = address
            address += self._library.ps_part_bytes(self._engine, ctypes.byref(struct), number)

    def _pack_part(self, struct: Linear, number: int, part: Tensor | QuantizedWeight) -> None:
        if isinstance(part, torch.Tensor):
            plain = part.to(self._dtype.in_torch).contiguous()
            self._library.ps_pack(self._engine, ctypes.byref(struct), plain.data_ptr())
            return
        if isinstance(part, StackedWeight):
            raise TypeError("a part of a stacked weight is not stacked itself")
        if isinstance(part, BlockWeight):
            blocks = part.blocks.contiguous()
            self._library.ps_pack_blocks(
                self._engine, ctypes.byref(struct), number, part.type_number, blocks.data_ptr()
            )
            return
        values, factors, *multipliers = [tensor.contiguous() for tensor in _numbers_of(part)]
        others = multipliers[0].data_ptr() if multipliers else None
        in_pairs = values.dtype is torch.uint8
        self._library.ps_pack_quantized(
            self._engine, ctypes.byref(struct), number, values.data_ptr(), in_pairs, factors.data_ptr(), others
        )

    def read_memory(self, memory: NDArray[np.float32]) -> float:
        """Return the sum of fp32 memory, a multiple of 128 numbers. The threads read it as fast as they can."""
        total: float = self._library.ps_read_memory(self._engine, memory.ctypes.data, memory.size)
        return total

    def table(self, weight: Tensor | QuantizedWeight) -> EmbeddingTable:
        """A quantised table is packed as a linear."""
        if isinstance(weight, QuantizedWeight) or self._memory.holds_linear():
            return EmbeddingTable.of_packed(self.pack(weight, None, 1.0, is_gated=False))
        rows = self._copy(weight, self._dtype)
        return EmbeddingTable(rows.ctypes.data, False, rows)

    def vector(self, weight: Tensor) -> NDArray[np.float32]:
        return self._copy(weight, Dtype.FP32)

    def _bias(self, bias: Tensor | None) -> NDArray[np.float32] | None:
        return None if bias is None else self.vector(bias)

    def _copy(self, weight: Tensor, dtype: Dtype) -> NDArray[Any]:
        place = self._memory.place(math.prod(weight.shape) * dtype.itemsize)
        if not self._memory.is_filled:
            torch.from_numpy(place).view(dtype.in_torch).view(weight.shape).copy_(weight)
        return place.view(dtype.in_numpy).reshape(weight.shape)


def _packing_of(weight: Tensor | QuantizedWeight) -> Packing:
    match weight:
        case Int8Weight():
            return Packing(bits=8)
        case Int4Weight(group_size=size):
            minima = Minima.ZERO_POINTS if bool((weight.zeros != 8).any()) else Minima.NONE
            return Packing(4, Codebook.INTEGERS, size, size, minima)
        case BlockWeight(form=PackedForm(group_size=int(size), has_zeros=False)) | Mxfp4Weight(group_size=size):
            return Packing(4, Codebook.E2M1, size, size, Minima.NONE)
        case BlockWeight(form=PackedForm(group_size=int(size))):
            return Packing(4, Codebook.INTEGERS, size, size, Minima.NONE)
        case GroupedWeight(form=GroupedForm() as form) | BlockWeight(form=GroupedForm() as form):
            codebook = Codebook.IQ4 if form.codebook == "iq4" else Codebook.INTEGERS
            minima = Minima.HALF if form.has_minima else Minima.NONE
            return Packing(form.bits, codebook, form.group_size, form.block_size, minima)
        case torch.Tensor():
            return Packing()
    raise TypeError(f"no kernels for {type(weight).__name__}: its weights are dequantised")


def _numbers_of(weight: SimpleWeight) -> tuple[Tensor, ...]:
    """Values, factors in fp32, and multipliers or zero points if the packing has them."""
    if isinstance(weight, Mxfp4Weight):
        return weight.values, weight.scales / 2  # the values of E2M1 are doubled to be integers
    return weight.parts


def _rows(weight: Tensor | QuantizedWeight, rows: slice) -> Tensor | QuantizedWeight:
    return weight[rows] if isinstance(weight, torch.Tensor) else take_rows(weight, rows)


def _address(vector: NDArray[np.float32] | None) -> int | None:
    return None if vector is None else vector.ctypes.data
