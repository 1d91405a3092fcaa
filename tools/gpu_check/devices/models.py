"""Configurations of the measured models, and random weights for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from penstock.backend.checkpoint.decoder_config import DecoderConfig, RopeConfig
from penstock.backend.checkpoint.tensors import LayerWeights

if TYPE_CHECKING:
    from torch import Tensor


def make_rope(head_dim: int, theta: float) -> RopeConfig:
    return RopeConfig(head_dim, tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2)))


def rope_theta(config: DecoderConfig) -> float:
    """Base frequency of plain rotary embeddings over whole heads."""
    return float(config.rope.inv_freq[1] ** (-config.head_dim / 2))


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

QWEN3_06B = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
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
    "llama-tied": replace(TINY, tie_embeddings=True),
    "qwen2-bias": replace(TINY, qkv_bias=True, num_kv_heads=1),
    "qwen2-window": replace(TINY, qkv_bias=True, layer_window_tokens=(None, 32)),
    "qwen3": replace(TINY, qk_norm="head", tie_embeddings=True),
    "smollm3": replace(TINY, layer_uses_rope=(True, False)),
    "phi3-partial": replace(TINY, rope=RopeConfig(32, make_rope(32, 10_000.0).inv_freq)),
}
"""One tiny model per feature that distinguishes the supported architectures."""


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
        self._layers = [self._make_layer() for _ in range(config.num_layers)]
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

    def _make_layer(self) -> LayerWeights[Tensor]:
        config = self._config
        heads = config.num_heads + 2 * config.num_kv_heads
        return LayerWeights(
            qkv=self._matrix(heads * config.head_dim, config.hidden_size),
            o=self._matrix(config.hidden_size, config.num_heads * config.head_dim),
            gate_up=self._matrix(2 * config.intermediate_size, config.hidden_size),
            down=self._matrix(config.hidden_size, config.intermediate_size),
            attention_norm=self._norm(config.hidden_size),
            mlp_norm=self._norm(config.hidden_size),
            q_norm=self._norm(config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(config.head_dim) if config.qk_norm else None,
            qkv_bias=self._numbers(heads * config.head_dim) * 0.1 if config.qkv_bias else None,
        )

    def _matrix(self, outputs: int, inputs: int) -> Tensor:
        return self._numbers(outputs, inputs).mul_(inputs**-0.5)

    def _norm(self, size: int) -> Tensor:
        return 1 + 0.1 * self._numbers(size)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=self._generator)
