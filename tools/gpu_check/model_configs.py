"""Configurations of the models that are measured, predicted and checked. Imports no torch: predictions use it."""

from __future__ import annotations

from dataclasses import replace

from penstock.backend.checkpoint.decoder_config import (
    ClampedGate,
    DecoderConfig,
    Experts,
    RopeConfig,
    Scales,
    TensorNames,
)


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

QWEN2_05B = DecoderConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    max_context_tokens=32_768,
    rope=make_rope(64, 1_000_000.0),
    tie_embeddings=True,
    qkv_bias=True,
)
"""The product of q, k and v has a bias, for which the library may take another workspace."""

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
