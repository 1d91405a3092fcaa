"""Layers with a gated delta rule in place of attention (kernels/rows/delta_net.cu).

A step changes the states of its rows' slots, which stay on the device. Steps read slots there, so they can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, DeltaNet
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher
from penstock.backend.passes.cuda.step.step_rows import CudaStep
from penstock.backend.passes.ops.interface import Linear
from penstock.backend.passes.ops.state_ops import DeltaNetWeights

KEY_DIMS = (64, 128)
NUM_LAUNCHES = 4
"""Kernels of a layer beside its products: a copy and three of ours."""
_THREADS = 128
_COLUMNS = 16
"""Columns of a state in a block."""


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for act in ACT_MACRO.values():
        for key_dim in KEY_DIMS:
            yield from _kernels(act, key_dim)


def _kernels(act: int, key_dim: int) -> tuple[Kernel, Kernel, Kernel]:
    """Return convolve, apply_rule and gate_results."""
    macros = (("ACT", act), ("KEY_DIM", key_dim))
    convolve, apply_rule, gate_results = (
        Kernel("rows/delta_net.cu", entry, macros, _THREADS) for entry in ("convolve", "apply_rule", "gate_results")
    )
    return convolve, apply_rule, gate_results


def unsupported_reason(net: DeltaNet) -> str | None:
    """Return why the kernels do not support the layers, or None."""
    if net.key_dim not in KEY_DIMS:
        return f"a delta rule's keys have {net.key_dim} values; the kernels have {' and '.join(map(str, KEY_DIMS))}"
    if net.value_dim % _COLUMNS or net.value_dim > _THREADS:
        return f"a delta rule's values have {net.value_dim}; they must be a multiple of {_COLUMNS}, at most {_THREADS}"
    return None


def delta_bytes(config: DecoderConfig, dtype: torch.dtype, max_tokens: int, padded_tokens: int) -> int:
    """Memory of the buffers, and of vectors and gates in fp32 beyond weights in dtype. States do not count."""
    net = config.delta_net
    if net is None:
        return 0
    gates = 2 * net.num_value_heads
    numbers = gates * (config.hidden_size + 1) + net.conv_width * net.num_channels + net.value_dim
    buffers = padded_tokens * (config.hidden_size + gates) + max_tokens * net.num_channels
    return 4 * buffers + sum(net.layers) * (numbers * (4 - dtype.itemsize) + 64)


@dataclass(eq=False, slots=True)
class CudaDeltaLayer:
    gates: Linear
    """In fp32."""
    conv: Tensor
    """[conv_width, num_channels]"""
    bias: Tensor
    decays: Tensor
    norm: Tensor
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    """fp32 [slots, num_value_heads, value_dim, key_dim]"""
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    """fp32 [slots, conv_width - 1, num_channels]: the convolution's last ones."""


class CudaDeltaNetOps:
    """Implements `DeltaNetOps`. No step allocates."""

    def __init__(
        self,
        launcher: Launcher,
        torch_device: torch.device,
        config: DecoderConfig,
        net: DeltaNet,
        dtype: torch.dtype,
        max_tokens: int,
        padded_tokens: int,
        vector: Callable[[Tensor], Tensor],
        linear: Callable[[Tensor], Linear],
        multiply: Callable[[Tensor, Linear, Tensor], Tensor],
        adapt: Callable[[Tensor, Linear, Tensor], None],
        attended: Callable[[int], Tensor],
    ) -> None:
        """linear packs a matrix in fp32; multiply(x [T, in], it, out) needs buffers of padded_tokens rows. adapt
        adds what adapters add to such a product of x in dtype. attended:
        the result's buffer of a step, by width."""
        self._launcher, self._device, self._net = launcher, torch_device, net
        self._vector, self._linear, self._attended = vector, linear, attended
        self._multiply, self._adapt = multiply, adapt
        self.kernels = self._convolve, self._apply_rule, self._gate_results = _kernels(ACT_MACRO[dtype], net.key_dim)
        """The kernels to pass to `Launcher.prepare`."""
        sizes = net.num_key_heads, net.num_value_heads, net.value_dim, net.conv_width
        self._sizes, self._eps = tuple(map(np.int32, sizes)), np.float32(config.norm_eps)

        def zeros(rows: int, width: int) -> Tensor:
            return torch.zeros(rows, width, device=torch_device)

        self._x, self._gates = zeros(padded_tokens, config.hidden_size), zeros(padded_tokens, 2 * net.num_value_heads)
        self._mixed = zeros(max_tokens, net.num_channels)
        self._layers: list[CudaDeltaLayer] = []

    def pack(self, weights: DeltaNetWeights) -> CudaDeltaLayer:
        vectors = map(self._vector, (weights.conv.t(), weights.bias, weights.decays, weights.norm))
        layer = CudaDeltaLayer(self._linear(weights.gates), *vectors)
        self._layers.append(layer)
        return layer

    def create_states(self, num_states: int, num_spares: int = 0) -> None:  # noqa: ARG002 - drafts are not verified
        net, shape = self._net, (len(self._layers), num_states)
        states = torch.zeros(*shape, net.num_value_heads, net.value_dim, net.key_dim, device=self._device)
        inputs = torch.zeros(*shape, net.conv_width - 1, net.num_channels, device=self._device)
        for index, layer in enumerate(self._layers):
            layer.states, layer.inputs = states[index], inputs[index]
        self.states = [states, inputs]
        """Each [layers, slots, …]."""

    def run(self, inputs: Tensor, x: Tensor, layer: CudaDeltaLayer, step: CudaStep) -> Tensor:
        net, rows, launch, num_tokens = self._net, step.rows, self._launcher.launch, len(x)
        gates = self._multiply(self._x[:num_tokens].copy_(x), layer.gates, self._gates[:num_tokens])
        self._adapt(x, layer.gates, gates)
        mixed, out, num_rows = self._mixed[:num_tokens], self._attended(net.value_size), len(rows.slots)
        of_rows = rows.query_starts, rows.context_lens, rows.slots
        num_heads = 2 * net.num_key_heads + net.num_value_heads
        launch(
            self._convolve, (num_tokens, num_heads, 1), inputs, layer.conv, layer.inputs, *of_rows, mixed,
            np.int32(num_rows), *self._sizes,
        )  # fmt: skip
        launch(
            self._apply_rule, (num_rows, net.num_value_heads, net.value_dim // _COLUMNS), inputs, gates, layer.bias,
            layer.decays, layer.states, layer.inputs, *of_rows, mixed, *self._sizes, np.int32(net.tiles_key_heads),
        )  # fmt: skip
        grid = num_tokens, net.num_value_heads, 1
        launch(self._gate_results, grid, inputs, mixed, layer.norm, out, *self._sizes, self._eps)
        return out
