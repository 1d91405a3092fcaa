"""Inputs of layers, and experts beside the MLP. Mostly the kernels of norms, embeddings and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import FROM_EMBEDDINGS
from penstock.backend.passes.cuda.ops.activations import Residual
from penstock.backend.passes.cuda.ops.device_weights import DeviceWeights
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.cuda.ops.expert_ops import CudaExpertOps, CudaExperts
from penstock.backend.passes.cuda.step.step_rows import CudaStep
from penstock.backend.passes.ops.interface import BesideNorms, LayerInput, Linear

LAUNCHES_OF_INPUTS, LAUNCHES_BESIDE = 5, 13
"""Kernels of a layer's input beside its products, and of a layer's sums and factors of experts."""


def side_bytes(config: DecoderConfig, dtype: torch.dtype, max_tokens: int, padded_tokens: int) -> int:
    """Memory of the buffers, and of vectors beyond weights in dtype."""
    inputs, size = config.num_layers * config.layer_input_size, config.layer_input_size
    vectors = 4 * config.hidden_size * config.num_layers
    num_bytes = 4 * max_tokens * (inputs + 1) + padded_tokens * (inputs + size) * dtype.itemsize
    return num_bytes + (2 * 4 * max_tokens * config.hidden_size + 4 * vectors if config.has_experts_beside else 0)


class CudaSideOps:
    """Implements `SideOps`. No step allocates."""

    streams: None = None

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        torch_device: torch.device,
        max_tokens: int,
        padded_tokens: int,
        weights: DeviceWeights,
        experts: CudaExpertOps | None,
        elementwise: Callable[[], Elementwise],
        input_ids: Callable[[], Tensor],
        embed: Callable[[Any, Tensor, CudaStep, Tensor, float], None],
        norm: Callable[[Residual, Tensor | None], Tensor],
        linear_add: Callable[[Tensor, Linear, Residual, Tensor], None],
        multiply: Callable[[Tensor, Linear, Tensor], Tensor],
    ) -> None:
        """embed, norm, linear_add and multiply are those of `CudaOps`, elementwise and input_ids its
        own from the cache on."""
        self._input_ids = input_ids
        self._config, self._weights, self._experts, self._elementwise = config, weights, experts, elementwise
        self._embed, self._norm, self._linear_add, self._multiply = embed, norm, linear_add, multiply
        size, hidden = config.layer_input_size, config.hidden_size
        self._scale = Dtype.of(dtype).round(size**0.5)

        def zeros(rows: int, width: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, width, dtype=of, device=torch_device)

        self._inputs = zeros(max_tokens, config.num_layers * size)
        """[T, layers * layer_input_size] of the current step."""
        self._ids = zeros(max_tokens, 1, torch.int32).flatten()
        self._projected = zeros(padded_tokens, config.num_layers * size, dtype)
        self._gates = zeros(padded_tokens, size, dtype)
        num_sums = max_tokens if config.has_experts_beside else 0
        self._total, self._results = zeros(num_sums, hidden), zeros(num_sums, hidden)

    def pack_inputs(self, table: Tensor | QuantizedWeight, projection: Tensor | QuantizedWeight, norm: Tensor) -> None:
        pack = self._weights.pack_linear
        if isinstance(table, Tensor):
            self._table: Any = self._weights.table(table)
        else:
            self._table = self._weights.packed_table(table, pack(table, None))
        self._projection = pack(projection, None, self._config.hidden_size**-0.5)
        self._norm_and_factor = self._weights.vector(torch.cat([norm.float(), norm.new_full((1,), 0.5**0.5).float()]))

    def begin_inputs(self, residual: Residual, step: CudaStep) -> None:
        num_tokens, size = step.num_tokens, self._config.layer_input_size
        given, ids = self._input_ids()[:num_tokens], self._ids[:num_tokens]
        torch.gt(given, FROM_EMBEDDINGS, out=ids).mul_(given)  # pictures have the inputs of token 0
        inputs = self._inputs[:num_tokens]
        self._embed(self._table, ids, step, inputs, self._scale)
        projected = self._multiply(self._norm(residual, None), self._projection, self._projected[:num_tokens])
        self._elementwise().rms_norm_added(inputs.view(-1, size), projected.view(-1, size), self._norm_and_factor)

    def add_input(self, index: int, layer: LayerInput, residual: Residual, step: CudaStep) -> None:
        size, x = self._config.layer_input_size, self._norm(residual, None)
        gates = self._multiply(x, layer.gate, self._gates[: len(x)])
        tokens = step.logit_tokens if step.is_decode_only else None  # after `last_tokens` too
        self._elementwise().gelu_mul_input(gates, self._inputs[:, index * size : (index + 1) * size], tokens)
        self._linear_add(gates, layer.projection, residual, layer.norm)

    def add_experts(
        self, mixed: Tensor, down: Linear, experts: CudaExperts, norms: BesideNorms, residual: Residual
    ) -> None:
        if self._experts is None:
            raise ValueError("these operations have none for experts")
        kernels, num_rows, hidden = self._elementwise(), len(mixed), self._config.hidden_size
        total, results = self._total[:num_rows].zero_(), self._results[:num_rows].zero_()
        self._linear_add(mixed, down, Residual(total), norms.dense)
        self._experts.choose(self._norm(residual, norms.router), experts)
        x = self._norm(residual, norms.expert_inputs)
        self._experts.add_chosen(x, experts, results)
        kernels.add_rms_norm(results, None, norms.experts, x)
        kernels.add_rms_norm(total.add_(x), None, norms.sum, x)
        residual.values.add_(x)
        if len(norms.sum) > hidden:
            residual.values.mul_(norms.sum[hidden:])
