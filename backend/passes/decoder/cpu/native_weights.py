"""Weights in the packed layout of the native kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.backend.checkpoint.float8_weight import Float8Weight
from penstock.backend.checkpoint.quantized_weights import GroupedWeight, Int4Weight, Int8Weight, Mxfp4Weight
from penstock.backend.passes.decoder.cpu.native_structs import Experts, Int4Kind, Linear, WeightForm
from penstock.backend.passes.decoder.cpu.weight_memory.anonymous import AnonymousMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.decoder_config import Experts as ExpertSettings
    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight
    from penstock.backend.passes.decoder.cpu.weight_memory.anonymous import WeightMemory
    from penstock.backend.passes.decoder.ops import ExpertWeights


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
    weights: tuple[Tensor, ...]
    """uint8 [experts, bytes]: gate and up, and down."""
    biases: tuple[Tensor | None, Tensor | None]
    """float32 biases of gate and up, and of down, as in `ExpertWeights`."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A weight's numbers, and the function of the kernels that packs them."""

    pack: Callable[..., None]
    tensors: tuple[Tensor, ...]
    """[outputs, …] each, with the outputs of all experts in order."""


class WeightPacker:
    """Packs weights for the kernels of one engine. dtype is that of weights: float32 or bfloat16.

    If the memory is already filled, it only reads how the weights are packed: then tensors need shapes but no content.
    """

    def __init__(
        self, library: ctypes.CDLL, engine: int | None, dtype: torch.dtype, memory: WeightMemory | None = None
    ) -> None:
        self._library = library
        self._engine = engine
        self._dtype = dtype
        self._memory = AnonymousMemory() if memory is None else memory
        self.linear_bytes = 0
        """Size of all packed linears, which a step of one row reads."""

    def memory(self) -> list[Tensor]:
        """All packed weights and tables, as uint8: views of the memory in which they lie."""
        return self._memory.used()

    def pack(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float, *, is_gated: bool
    ) -> PackedLinear:
        outputs, inputs = weight.shape
        bias = self._bias(bias)
        struct = Linear(
            bias=_address(bias),
            inputs=inputs,
            outputs=outputs // (1 + is_gated),
            gated=is_gated,
            scale=scale,
        )
        packed = self._fill(struct, weight)
        return PackedLinear(ctypes.addressof(struct), struct, packed[0], bias)

    def pack_experts(self, weights: ExpertWeights, settings: ExpertSettings, scale: float) -> PackedExperts:
        hidden = weights.router.shape[1]
        biases = self._bias(weights.gate_up_bias), self._bias(weights.down_bias)
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
        )
        router = self.pack(weights.router, weights.router_bias, 1.0, is_gated=False)
        return PackedExperts(ctypes.addressof(struct), struct, router, packed, biases)

    def _numbers_of(self, weight: Tensor | QuantizedWeight, struct: Linear) -> _Numbers:
        """Set the struct's form to the weight's."""
        match weight:
            case Int8Weight():
                struct.form = WeightForm.INT8
                return _Numbers(self._library.ps_pack_int8, weight.parts)
            case Int4Weight():
                struct.form, struct.group_size = WeightForm.INT4, weight.group_size
                struct.int4_kind = Int4Kind.ZERO_POINTS if bool((weight.zeros != 8).any()) else Int4Kind.SYMMETRIC
                return _Numbers(self._library.ps_pack_int4, weight.parts)
            case Mxfp4Weight():
                struct.form, struct.group_size = WeightForm.INT4, weight.group_size
                struct.int4_kind = Int4Kind.E2M1
                return _Numbers(self._pack_e2m1, (weight.values, weight.scales / 2))
            case GroupedWeight(form):
                struct.form = WeightForm.GROUPED4 if form.bits == 4 else WeightForm.GROUPED8
                struct.group_size, struct.block_size = form.group_size, form.block_size
                struct.has_minima = form.has_minima
                return _Numbers(self._library.ps_pack_grouped, weight.parts)
            case Float8Weight():
                raise TypeError("no kernels for E4M3: its weights are dequantised")
            case Tensor():
                return _Numbers(self._library.ps_pack, (weight.to(self._dtype),))

    def _pack_e2m1(self, engine: int, struct: object, values: int, scales: int) -> None:
        self._library.ps_pack_int4(engine, struct, values, scales, None)

    def _fill(self, struct: Linear, weight: Tensor | QuantizedWeight, count: int = 1, num_read: int = 1) -> Tensor:
        """Pack count linears, one after the other. A row reads num_read of them. struct describes the first."""
        self._memory.give_form_to(struct)
        numbers = None if self._memory.is_filled else self._numbers_of(weight, struct)
        num_bytes = self._library.ps_packed_bytes(self._engine, ctypes.byref(struct))
        packed = self._memory.place(count * num_bytes, struct).view(count, num_bytes)
        self.linear_bytes += num_read * num_bytes
        if numbers is not None:
            for target, *parts in zip(packed, *(tensor.chunk(count) for tensor in numbers.tensors), strict=True):
                struct.packed = target.data_ptr()
                rows = [part.contiguous() for part in parts]
                numbers.pack(self._engine, ctypes.byref(struct), *(part.data_ptr() for part in rows))
        struct.packed = packed.data_ptr()
        return packed

    def read_memory(self, memory: Tensor) -> float:
        """Return the sum of fp32 memory, a multiple of 128 numbers. The threads read it as fast as they can."""
        total: float = self._library.ps_read_memory(self._engine, memory.data_ptr(), memory.numel())
        return total

    def table(self, weight: Tensor) -> EmbeddingTable:
        rows = self._copy(weight, self._dtype)
        return EmbeddingTable(rows.data_ptr(), False, rows)

    def vector(self, weight: Tensor) -> Tensor:
        """Convert to float32, contiguous."""
        return self._copy(weight, torch.float32)

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.vector(bias)

    def _copy(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        copy = self._memory.place(weight.numel() * dtype.itemsize).view(dtype).view(weight.shape)
        return copy if self._memory.is_filled else copy.copy_(weight)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
