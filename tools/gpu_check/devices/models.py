"""Random weights for a model of any configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from penstock.backend.checkpoint.tensors import LayerWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import DecoderConfig, Experts
    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight


class RandomWeights:
    """Random weights on one device, shared by several passes.

    Norms are near 1; matrices are normal with standard deviation 1 / sqrt(inputs), so that activations neither vanish
    nor overflow.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._embedding = self._matrix(config.vocab_size, config.hidden_size)
        self._lm_head = None if config.tie_embeddings else self._matrix(config.vocab_size, config.hidden_size)
        self._layers = [self._make_layer(index) for index in range(config.num_layers)]
        self._final_norm = self._norm(config.hidden_size)

    def embedding(self, dtype: torch.dtype) -> Tensor:
        return self._embedding.to(dtype)

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor]:
        made = self._layers[index]
        present = {name: x.to(dtype) for name in LayerWeights.__slots__ if (x := getattr(made, name)) is not None}
        return LayerWeights(**present)

    def final_norm(self, dtype: torch.dtype) -> Tensor:
        return self._final_norm.to(dtype)

    def lm_head(self, dtype: torch.dtype) -> Tensor | None:
        return None if self._lm_head is None else self._lm_head.to(dtype)

    def _make_layer(self, index: int) -> LayerWeights[Tensor]:
        config = self._config
        heads = config.num_heads + 2 * config.num_kv_heads
        has_experts = bool(config.layer_has_experts) and config.layer_has_experts[index]
        has_output_norms = config.names.attention_output_norm is not None
        layer: LayerWeights[Tensor] = LayerWeights(
            qkv=self._matrix(heads * config.head_dim, config.hidden_size),
            o=self._matrix(config.hidden_size, config.num_heads * config.head_dim),
            gate_up=None if has_experts else self._matrix(2 * config.intermediate_size, config.hidden_size),
            down=None if has_experts else self._matrix(config.hidden_size, config.intermediate_size),
            attention_norm=self._norm(config.hidden_size),
            mlp_norm=self._norm(config.hidden_size),
            attention_output_norm=self._norm(config.hidden_size) if has_output_norms else None,
            mlp_output_norm=self._norm(config.hidden_size) if has_output_norms else None,
            q_norm=self._norm(config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(config.head_dim) if config.qk_norm else None,
            qkv_bias=self._numbers(heads * config.head_dim) * 0.1 if config.qkv_bias else None,
            sinks=self._numbers(config.num_heads) if config.sinks else None,
        )
        return replace(layer, **self._expert_tensors(config.experts)) if has_experts and config.experts else layer

    def _expert_tensors(self, experts: Experts) -> dict[str, Tensor]:
        hidden, count, width = self._config.hidden_size, experts.count, experts.width
        tensors = {
            "router": self._matrix(count, hidden) * 3,
            "expert_gate_up": self._matrix(count * 2 * width, hidden),
            "expert_down": self._matrix(count * hidden, width),
        }
        if experts.biased:
            sizes = {"router_bias": count, "expert_gate_up_bias": count * 2 * width, "expert_down_bias": count * hidden}
            tensors |= {name: self._numbers(size) * 0.1 for name, size in sizes.items()}
        return tensors

    def _matrix(self, outputs: int, inputs: int) -> Tensor:
        return self._numbers(outputs, inputs).mul_(inputs**-0.5)

    def _norm(self, size: int) -> Tensor:
        return 1 + 0.1 * self._numbers(size)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=self._generator)


class QuantizedRandomWeights(RandomWeights):
    """The same weights, quantised by a function of a matrix."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantize: Callable[[Tensor], QuantizedWeight],
    ) -> None:
        super().__init__(config, dtype, device)
        self._quantize = quantize

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Any]:
        layer: LayerWeights[Any] = super().layer(index, dtype)
        found = {name: getattr(layer, name) for name in _MATRICES}
        matrices: dict[str, Any] = {name: self._quantize(x) for name, x in found.items() if x is not None}
        return replace(layer, **matrices)


_MATRICES = ("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down")
