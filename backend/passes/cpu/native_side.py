"""Inputs of layers, and experts beside the MLP, by our own C++ kernels (kernels/rows/layer_inputs.h)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.library.native_structs import (
    AddNorm,
    Buffer,
    LayerInputs,
    LinearOutput,
    OperationKind,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.passes.cpu.native_experts import NativeExpertOps
    from penstock.backend.passes.cpu.weight_memory.native_weights import PackedExperts, PackedLinear, WeightPacker
    from penstock.backend.passes.ops.interface import BesideNorms, LayerInput, StreamOps


class NativeSideOps:
    """Implements `SideOps`. do, linear, norm, add_norm and experts() are those of `NativeOps` at any time."""

    def __init__(
        self,
        config: DecoderConfig,
        packer: WeightPacker,
        dtype: Dtype,
        do: Callable[..., int],
        linear: Callable[[int, PackedLinear, int, LinearOutput], int],
        norm: Callable[[int, NDArray[np.float32] | None], int],
        add_norm: Callable[..., None],
        experts: Callable[[], NativeExpertOps | None],
    ) -> None:
        size, width = config.layer_input_size, config.hidden_size
        self._packer, self._experts = packer, experts
        self._do, self._linear, self._norm, self._add_norm = do, linear, norm, add_norm
        self._projection: PackedLinear | None = None
        self._projection_scale = config.hidden_size**-0.5
        self._struct = LayerInputs(
            width=size, num_layers=config.num_layers, num_ids=config.input_rows, scale=dtype.round(size**0.5)
        )
        self.streams: StreamOps | None = None
        self._owners: tuple[object, ...] = ()
        """Of the memory that the struct points to."""
        self._inputs, self._gates = Buffer(config.num_layers * size, Dtype.FP32), Buffer(size, dtype)
        self._results, self._sum = Buffer(width, Dtype.FP32), Buffer(width, Dtype.FP32)
        self.buffers = (self._inputs, self._gates, self._results, self._sum)

    def pack_inputs(self, table: Tensor | QuantizedWeight, projection: Tensor | QuantizedWeight, norm: Tensor) -> None:
        rows, vector = self._packer.table(table), self._packer.vector(norm)
        self._projection = self._packer.pack(projection, None, self._projection_scale, is_gated=False)
        self._struct.table, self._struct.is_packed, self._struct.norm = rows.address, rows.is_packed, vector.ctypes.data
        self._owners = rows, vector

    def begin_inputs(self, residual: int, step: object) -> None:  # noqa: ARG002 - ps_plan received the step
        if self._projection is None:
            raise ValueError("pack_inputs was not called")
        x = self._norm(residual, None)
        out = self._linear(x, self._projection, self._inputs.address, LinearOutput.STORE_FLOAT)
        self._do(OperationKind.LAYER_INPUTS, ctypes.addressof(self._struct), None, out)

    def add_input(self, index: int, layer: LayerInput, residual: int, step: object) -> None:
        self._add_norm(self.input_of(index, layer, residual, step), layer.norm, residual)

    def input_of(self, index: int, layer: LayerInput, residual: int, step: object) -> int:  # noqa: ARG002 - as above
        x = self._norm(residual, None)
        gates = self._linear(x, layer.gate, self._gates.address, LinearOutput.GELU)
        struct = ctypes.addressof(self._struct)
        self._do(OperationKind.WEIGHT_BY_INPUT, struct, self._inputs.address, gates, index)
        return self._linear(gates, layer.projection, self._results.address, LinearOutput.STORE_FLOAT)

    def add_experts(
        self, mixed: int, down: PackedLinear, experts: PackedExperts, norms: BesideNorms, residual: int
    ) -> None:
        own = self._experts()
        if own is None:
            raise ValueError("these operations have none for experts")
        dense = self._linear(mixed, down, self._results.address, LinearOutput.STORE_FLOAT)
        self._add_norm(dense, norms.dense, self._sum.address, AddNorm.STORE)
        own.rate(self._norm(residual, norms.router), experts)
        x = self._norm(residual, norms.expert_inputs)
        own.add_rated(x, experts, self._results.address, replaces=True)
        self._add_norm(self._results.address, norms.experts, self._sum.address)
        self._add_norm(self._sum.address, norms.sum, residual)
