"""Layers with a gated delta rule by our own C++ kernels (kernels/rows/delta_net.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.dtypes import Dtype, empty_array
from penstock.backend.passes.cpu.library.native_structs import Buffer, DeltaNet, LinearOutput, OperationKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.backend.checkpoint.config.decoder_config import DeltaNet as Settings
    from penstock.backend.passes.cpu.weight_memory.native_weights import PackedLinear, WeightPacker
    from penstock.backend.passes.ops.interface import DeltaNetWeights


@dataclass(eq=False, slots=True)
class _Layer:
    struct: DeltaNet
    gates: PackedLinear
    weights: tuple[NDArray[np.float32], ...]
    """They own the memory that the struct points to, as states do."""
    states: tuple[NDArray[np.float32], ...] = ()


@dataclass(slots=True)
class NativeDeltaNetOps:
    """Implements `DeltaNetOps`. do and linear run or record an operation of `NativeOps`."""

    settings: Settings
    packer: WeightPacker
    do: Callable[..., int]
    linear: Callable[[int, PackedLinear, int, LinearOutput], int]
    output: Buffer
    buffers: tuple[Buffer, Buffer] = field(init=False)
    """Of gates and of the convolution's results: a row for each token."""
    _layers: list[_Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        net = self.settings
        self.buffers = Buffer(2 * net.num_value_heads, Dtype.FP32), Buffer(net.num_channels, Dtype.FP32)

    def pack(self, weights: DeltaNetWeights) -> _Layer:
        net = self.settings
        plain = (weights.conv.t(), weights.bias, weights.decays, weights.norm)
        conv, bias, decays, norm = vectors = tuple(self.packer.vector(vector) for vector in plain)
        struct = DeltaNet(
            conv=conv.ctypes.data,
            bias=bias.ctypes.data,
            decays=decays.ctypes.data,
            norm=norm.ctypes.data,
            key_heads=net.num_key_heads,
            value_heads=net.num_value_heads,
            key_dim=net.key_dim,
            value_dim=net.value_dim,
            width=net.conv_width,
            tiles_key_heads=net.tiles_key_heads,
        )
        layer = _Layer(struct, self.packer.pack(weights.gates, None, 1.0, is_gated=False), vectors)
        self._layers.append(layer)
        return layer

    def create_states(self, num_states: int, num_spares: int = 0) -> None:
        net, count = self.settings, num_states + num_spares
        for layer in self._layers:
            states = empty_array((count, net.value_size, net.key_dim), Dtype.FP32)
            inputs = empty_array((count, net.conv_width - 1, net.num_channels), Dtype.FP32)
            layer.states, layer.struct.first_spare = (states, inputs), num_states
            layer.struct.states, layer.struct.inputs = states.ctypes.data, inputs.ctypes.data

    @property
    def states(self) -> list[NDArray[np.float32]]:
        return [array for layer in self._layers for array in layer.states]

    def run(self, inputs: int, x: int, layer: _Layer, step: object) -> int:  # noqa: ARG002 - ps_plan received the step
        gates, mixed = self.buffers
        # Whenever a buffer moves, the operations are recorded again.
        layer.struct.gates, layer.struct.mixed = gates.address, mixed.address
        self.linear(x, layer.gates, gates.address, LinearOutput.STORE_FLOAT)
        return self.do(OperationKind.DELTA_NET, ctypes.addressof(layer.struct), inputs, self.output.address)

    def close(self) -> None:
        self._layers.clear()
