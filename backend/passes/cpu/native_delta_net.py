"""Our C++ kernels for parts of a model that keep a state for each slot: layers with a gated delta rule
(kernels/rows/delta_net.h), and the head that predicts the token after the next one (kernels/rows/mtp.h)."""

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
    from penstock.backend.passes.cpu.weight_memory.native_weights import EmbeddingTable, PackedLinear, WeightPacker
    from penstock.backend.passes.ops.state_ops import DeltaNetWeights, MtpWeights


class Mtp(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding_norm", "hidden_norm", "kept", "given")),
        ("first_spare", ctypes.c_int64),
    )


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


@dataclass(slots=True)
class NativeMtpOps:
    """Implements `MtpOps`. do and linear run or record an operation of `NativeOps`."""

    hidden_size: int
    dtype: Dtype
    do: Callable[..., int]
    linear: Callable[[int, PackedLinear, int, LinearOutput], int]
    buffers: tuple[Buffer, Buffer] = field(init=False)
    """Of the head's residual stream and of its inputs."""
    kept: NDArray[np.float32] = field(init=False)
    """[states, hidden]: those of the model's slots, checkpoints and spares; behind these those of guesses."""
    first_guess: int = 0
    _structs: tuple[Mtp, Mtp] = field(default_factory=lambda: (Mtp(), Mtp()))
    """Of the model's steps, and of guesses."""

    def __post_init__(self) -> None:
        self.buffers = Buffer(self.hidden_size, Dtype.FP32), Buffer(2 * self.hidden_size, self.dtype)

    def create_states(self, num_states: int, num_spares: int, num_guesses: int) -> None:
        self.first_guess = num_states + num_spares
        self.kept = empty_array((self.first_guess + num_guesses, self.hidden_size), Dtype.FP32)
        for struct, first in zip(self._structs, (0, self.first_guess), strict=True):
            struct.kept, struct.first_spare = self.kept[first:].ctypes.data, num_states

    def begin(self, table: EmbeddingTable, weights: MtpWeights, given: int | None) -> int:
        struct = self._structs[given is None]
        struct.embedding_norm, struct.hidden_norm = (
            norm.ctypes.data for norm in (weights.embedding_norm, weights.hidden_norm)
        )
        struct.given = given
        stream, inputs = (buffer.address for buffer in self.buffers)
        self.do(OperationKind.EMBED, table.address, None, stream, table.is_packed)
        self.do(OperationKind.MTP_INPUTS, ctypes.addressof(struct), stream, inputs)
        if given is not None:
            self.keep(given, is_guess=False)
        return self.linear(inputs, weights.fc, stream, LinearOutput.STORE_FLOAT)

    def keep(self, given: int, *, is_guess: bool) -> None:
        self.do(OperationKind.KEEP_GIVEN, ctypes.addressof(self._structs[is_guess]), given, given)
