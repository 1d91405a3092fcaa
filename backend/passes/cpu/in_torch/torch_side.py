"""A step in plain torch, and what some layers have beside attention and the MLP: inputs of their own, and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.in_torch.torch_delta_net import DeltaRow
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.forward_pass import EmbeddedTokens
    from penstock.backend.passes.cpu.in_torch.paged_cache import PagedStep
    from penstock.backend.passes.cpu.in_torch.torch_experts import TorchExpertOps, TorchExperts
    from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import TorchLinear
    from penstock.backend.passes.ops.interface import BesideNorms, LayerInput, StreamOps


@dataclass(frozen=True, slots=True)
class TorchStep:
    """One step's tokens as tensors."""

    input_ids: Tensor
    turns: tuple[Tensor, ...]
    """[T, 2, 1, rotary_dim / 2] for each rope: cosines and sines."""
    paged: list[PagedStep]
    """By group of layers."""
    last_tokens: Tensor
    """[L + S] `StepBatch.logit_tokens`."""
    num_logits: int
    embeddings: tuple[EmbeddedTokens, ...]
    rows: list[DeltaRow]
    is_narrowed: bool = False
    """To last_tokens."""


class TorchSideOps:
    """Implements `SideOps`. The functions are those of `TorchOps`."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        experts: TorchExpertOps | None,
        pack_linear: Callable[..., TorchLinear],
        product: Callable[[Tensor, TorchLinear], Tensor],
        activate: Callable[[Tensor], Tensor],
        row_norm: Callable[[Tensor, Tensor], Tensor],
        add_norm: Callable[[Tensor, Tensor, Tensor], None],
    ) -> None:
        self._config, self._dtype, self._experts, self._pack_linear = config, dtype, experts, pack_linear
        self._product, self._activate, self._row_norm, self._add_norm = product, activate, row_norm, add_norm
        self.streams: StreamOps | None = None
        self._inputs = torch.empty(0)
        """[T, layers, layer_input_size] fp32 of the current step."""

    def pack_inputs(self, table: Tensor | QuantizedWeight, projection: Tensor | QuantizedWeight, norm: Tensor) -> None:
        if isinstance(table, Tensor):
            self._table: Tensor | QuantizedWeight = table.to(self._dtype)
        else:
            packed = self._pack_linear(table, None)
            self._table = packed.weight if isinstance(packed, QuantizedLinear) else table.dequantize().to(self._dtype)
        self._projection = self._pack_linear(projection, None, self._config.hidden_size**-0.5)
        self._norm = norm.float()

    def begin_inputs(self, residual: Tensor, step: TorchStep) -> None:
        shape = len(residual), self._config.num_layers, self._config.layer_input_size
        ids = step.input_ids.where(step.input_ids < self._config.input_rows, 0)
        rows = rows_of(self._table, ids).view(shape)
        projected = self._product(residual.to(self._dtype), self._projection).float().view(shape)
        scale = Dtype.of(self._dtype).round(self._config.layer_input_size**0.5)
        self._inputs = (self._row_norm(projected, self._norm) + rows * scale) * 0.5**0.5

    def add_input(self, index: int, layer: LayerInput, residual: Tensor, step: TorchStep) -> None:
        self._add_norm(self.input_of(index, layer, residual, step), layer.norm, residual)

    def input_of(self, index: int, layer: LayerInput, residual: Tensor, step: TorchStep) -> Tensor:
        inputs = self._inputs[step.last_tokens, index] if step.is_narrowed else self._inputs[:, index]
        gates = self._activate(self._product(residual.to(self._dtype), layer.gate).float()) * inputs
        return self._product(gates.to(self._dtype), layer.projection).float()

    def add_experts(
        self, mixed: Tensor, down: TorchLinear, experts: TorchExperts, norms: BesideNorms, residual: Tensor
    ) -> None:
        if self._experts is None:
            raise ValueError("these operations have none for experts")
        total = self._row_norm(self._product(mixed, down).float(), norms.dense)
        rated, x = (self._row_norm(residual, norm).to(self._dtype) for norm in (norms.router, norms.expert_inputs))
        total += self._row_norm(self._experts.results(rated, x, experts), norms.experts)
        self._add_norm(total, norms.sum, residual)


def rows_of(table: Tensor | QuantizedWeight, ids: Tensor) -> Tensor:
    """Rows of an embedding table, fp32."""
    if isinstance(table, Tensor):
        return functional.embedding(ids, table).float()
    return take_rows(table, ids).dequantize()
