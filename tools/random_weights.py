"""Models in memory: configurations of measured and of tiny models, and random weights for any configuration.

The GPU checks import no package for it but torch. `random_model` writes checkpoints with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.architectures.encoder_names import EncoderNames
from penstock.backend.checkpoint.config.decoder_config import (
    ClampedGate,
    DecoderConfig,
    Experts,
    RopeConfig,
    Scales,
    TensorNames,
)
from penstock.backend.checkpoint.config.tensors import LayerWeights
from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig, Head, HeadLayer
from penstock.backend.checkpoint.encoders.tensors import EncoderLayerWeights, HeadLayerWeights
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.dtypes import Dtype


def make_rope(head_dim: int, theta: float) -> RopeConfig:
    return RopeConfig(head_dim, tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2)))


LLAMA_8B = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    max_context_tokens=131_072,
    rope=make_rope(128, 500_000.0),
    tie_embeddings=False,
)
"""Llama-3.1-8B's dimensions, without its scaling of rotary frequencies, which changes no cost."""

QWEN3_06B = replace(
    LLAMA_8B,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    norm_eps=1e-6,
    max_context_tokens=40_960,
    rope=make_rope(128, 1_000_000.0),
    tie_embeddings=True,
    qk_norm="head",
)

TINY = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=200,
    hidden_size=256,
    intermediate_size=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    max_context_tokens=512,
    rope=make_rope(64, 10_000.0),
    tie_embeddings=False,
)
"""About the smallest model that the kernels accept."""

TINY_FAMILY = {
    "llama": TINY,
    "qwen2-window": replace(TINY, qkv_bias=True, num_kv_heads=1, layer_window_tokens=(None, 32)),
    "qwen3": replace(TINY, qk_norm="head", tie_embeddings=True),
    "smollm3": replace(TINY, layer_uses_rope=(True, False)),
    "phi3-partial": replace(TINY, rope=RopeConfig(32, make_rope(32, 10_000.0).inv_freq)),
    "8-kv-heads-of-128": replace(
        TINY, num_layers=1, num_heads=16, num_kv_heads=8, head_dim=128, rope=make_rope(128, 10_000.0)
    ),
    "1-kv-head-of-256": replace(
        TINY, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=256, rope=make_rope(256, 10_000.0)
    ),
    "qwen3-moe": replace(
        TINY,
        num_heads=8,
        num_kv_heads=8,
        qk_norm="head",
        experts=Experts(8, 2, 96, normalises=True),
        layer_has_experts=(True, False),
    ),
    "gpt-oss": replace(
        TINY,
        num_kv_heads=1,
        qkv_bias=True,
        sinks=True,
        layer_window_tokens=(16, None),
        experts=Experts(4, 2, 96, normalises=True, biased=True, clamped_gate=ClampedGate(1.702, 7.0)),
        layer_has_experts=(True, True),
    ),
    "gemma2": replace(
        TINY,
        activation="gelu_tanh",
        norm_offset=1.0,
        tie_embeddings=True,
        layer_window_tokens=(16, None),
        scales=Scales(embedding=4.0, scores_softcap=5.0, logits_softcap=3.0),
        names=TensorNames(attention_output_norm="a", mlp_output_norm="b"),
    ),
}
"""One tiny model per feature that distinguishes the supported architectures, with 1, 2 and 8 KV heads of 64 to 256."""

SMALL_BERT = EncoderConfig(
    architecture="BertModel",
    vocab_size=1000,
    hidden_size=192,
    intermediate_size=768,
    num_layers=3,
    num_heads=6,
    norm_eps=1e-12,
    max_context_tokens=256,
    activation="gelu",
    names=EncoderNames(prefixes=("",)),
    heads=(Head("embed", ("mean",), (HeadLayer("dense.weight", "dense.bias", 192, 192, "tanh"),)),),
    num_positions=256,
    num_token_types=2,
)
"""The demo embedding model's dimensions, with fewer words."""


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, int, int]]:
    """Weight name → outputs, inputs and products per step."""
    heads = config.num_heads + 2 * config.num_kv_heads
    return {
        "qkv": (heads * config.head_dim, config.hidden_size, config.num_layers),
        "o": (config.hidden_size, config.num_heads * config.head_dim, config.num_layers),
        "gate_up": (2 * config.intermediate_size, config.hidden_size, config.num_layers),
        "down": (config.hidden_size, config.intermediate_size, config.num_layers),
        "lm_head": (config.vocab_size, config.hidden_size, 1),
    }


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

    def embedding(self, dtype: Dtype) -> Tensor:
        return self._embedding.to(dtype.in_torch)

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[Tensor]:
        made = self._layers[index]
        present = {
            name: x.to(dtype.in_torch) for name in LayerWeights.__slots__ if (x := getattr(made, name)) is not None
        }
        return LayerWeights(**present)

    def final_norm(self, dtype: Dtype) -> Tensor:
        return self._final_norm.to(dtype.in_torch)

    def lm_head(self, dtype: Dtype) -> Tensor | None:
        return None if self._lm_head is None else self._lm_head.to(dtype.in_torch)

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
        quantize: Callable[[Tensor], QuantizedWeight | Tensor],
    ) -> None:
        super().__init__(config, dtype, device)
        self._matrices: list[dict[str, Any]] = [
            {name: quantize(x) for name in _MATRICES if (x := getattr(layer, name)) is not None}
            for layer in self._layers
        ]

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[Any]:
        return replace(super().layer(index, dtype), **self._matrices[index])


_MATRICES = ("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down")


class RandomEncoderWeights:
    """Random weights on the CPU: the same for the same configuration.

    Norms are near 1; matrices are normal with standard deviation 1 / sqrt(inputs).
    """

    def __init__(self, config: EncoderConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed

    def words(self) -> Tensor:
        return self._numbers(0, self._config.vocab_size, self._config.hidden_size)

    def table(self, name: str, dtype: torch.dtype) -> Tensor | None:
        rows = {"positions": self._config.num_positions, "token_types": self._config.num_token_types}.get(name)
        return self._numbers(len(name), rows, self._config.hidden_size).to(dtype) if rows else None

    def embedding_norm(self) -> Tensor:
        return self._norm(1)

    def relative_norm(self) -> Tensor:
        return self._norm(2)

    def final_norm(self) -> None:
        return None

    def layer(self, index: int) -> EncoderLayerWeights:
        first, hidden, inner = 100 * (index + 1), self._config.hidden_size, self._config.intermediate_size
        return EncoderLayerWeights(
            qkv=self._matrix(first, 3 * hidden, hidden),
            output=self._matrix(first + 1, hidden, hidden),
            mlp_in=self._matrix(first + 2, inner, hidden),
            mlp_out=self._matrix(first + 3, hidden, inner),
            mlp_norm=self._norm(first + 4),
            attention_norm=self._norm(first + 5),
            qkv_bias=self._numbers(first + 6, 3 * hidden) * 0.1,
            output_bias=self._numbers(first + 7, hidden) * 0.1,
            mlp_in_bias=self._numbers(first + 8, inner) * 0.1,
            mlp_out_bias=self._numbers(first + 9, hidden) * 0.1,
        )

    def head_layer(self, layer: HeadLayer) -> HeadLayerWeights:
        return HeadLayerWeights(
            weight=self._matrix(60, layer.outputs, layer.inputs), bias=self._numbers(61, layer.outputs) * 0.1, norm=None
        )

    def _matrix(self, number: int, outputs: int, inputs: int) -> Tensor:
        return self._numbers(number, outputs, inputs).mul_(inputs**-0.5)

    def _norm(self, number: int) -> Tensor:
        """[weight | bias]"""
        hidden = self._config.hidden_size
        return torch.cat([1 + 0.1 * self._numbers(number, hidden), 0.1 * self._numbers(number + 50, hidden)])

    def _numbers(self, number: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self._seed + number)
        return torch.empty(shape).normal_(generator=generator)
