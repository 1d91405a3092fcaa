"""The gated delta rule in torch, token by token: a token's numbers have the same shapes, and so the same bits, in any
batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.config.decoder_config import DeltaNet
from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear
from penstock.backend.passes.ops.interface import Step
from penstock.backend.passes.ops.state_ops import DeltaNetWeights

_LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """A row of a step."""

    first: int
    end: int
    slot: int
    is_new: bool


def delta_rows(batch: StepBatch) -> list[DeltaRow]:
    starts, columns = batch.query_starts.tolist(), (batch.slots.tolist(), batch.context_lens.tolist())
    rows = zip(pairwise(starts), *columns, strict=True)
    return [DeltaRow(first, end, slot, context == 0) for (first, end), slot, context in rows]


@dataclass(eq=False, slots=True)
class _Layer:
    weights: DeltaNetWeights
    """In fp32."""
    gates: PackedLinear
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    """[slots, num_value_heads, key_dim, value_dim]"""
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    """[slots, num_channels, conv_width - 1]"""


@dataclass(slots=True)
class TorchDeltaNetOps:
    """Implements `DeltaNetOps`."""

    settings: DeltaNet
    norm_eps: float
    product: Callable[[Tensor, PackedLinear], Tensor]
    _layers: list[_Layer] = field(default_factory=list)

    def pack(self, weights: DeltaNetWeights) -> _Layer:
        in_fp32 = DeltaNetWeights(
            *(weight.float() for weight in (weights.gates, weights.conv, weights.bias, weights.decays, weights.norm))
        )
        layer = _Layer(in_fp32, PackedLinear.pack(in_fp32.gates, None))
        self._layers.append(layer)
        return layer

    def create_states(self, num_states: int, num_spares: int = 0) -> None:  # noqa: ARG002 - drafts are not verified
        net = self.settings
        for layer in self._layers:
            layer.states = torch.zeros(num_states, net.num_value_heads, net.key_dim, net.value_dim)
            layer.inputs = torch.zeros(num_states, net.num_channels, net.conv_width - 1)

    @property
    def states(self) -> list[NDArray[np.float32]]:
        return [tensor.numpy() for layer in self._layers for tensor in (layer.states, layer.inputs)]

    def run(self, inputs: Tensor, x: Tensor, layer: _Layer, step: Step) -> Tensor:
        strengths, decays = self.product(x.float(), layer.gates).chunk(2, dim=1)
        results = torch.empty(len(x), self.settings.value_size, dtype=x.dtype)
        for row in step.rows:
            if row.is_new:
                layer.states[row.slot] = 0
                layer.inputs[row.slot] = 0
            for token in range(row.first, row.end):
                results[token] = self._token(layer, row.slot, inputs[token].float(), strengths[token], decays[token])
        return results

    def _token(self, layer: _Layer, slot: int, inputs: Tensor, strength: Tensor, decay: Tensor) -> Tensor:
        net, weights, state = self.settings, layer.weights, layer.states[slot]
        mixed, gates = inputs[: net.num_channels], inputs[net.num_channels :]
        seen = torch.cat([layer.inputs[slot], mixed[:, None]], dim=1)
        layer.inputs[slot] = seen[:, 1:]
        keys = net.num_key_heads * net.key_dim
        convolved = functional.silu((seen * weights.conv).sum(1))
        queries, keys_now, values = torch.split(convolved, [keys, keys, net.value_size])
        query, key = self._of_value_heads(queries) * net.key_dim**-0.5, self._of_value_heads(keys_now)
        state *= (weights.decays * functional.softplus(decay + weights.bias)).exp()[:, None, None]
        known = (state * key[:, :, None]).sum(1)
        update = (values.view(net.num_value_heads, -1) - known) * strength.sigmoid()[:, None]
        state += key[:, :, None] * update[:, None]
        read = (state * query[:, :, None]).sum(1)
        normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + self.norm_eps) * weights.norm
        result: Tensor = normed.flatten() * functional.silu(gates)
        return result

    def _of_value_heads(self, heads: Tensor) -> Tensor:
        """[num_value_heads, key_dim], each of length 1, from those of key heads."""
        net = self.settings
        own = heads.view(net.num_key_heads, net.key_dim)
        own = own * torch.rsqrt(own.square().sum(-1, keepdim=True) + _LENGTH_EPS)
        if net.tiles_key_heads:
            return own.repeat(net.values_per_key, 1)
        return own.repeat_interleave(net.values_per_key, dim=0)
