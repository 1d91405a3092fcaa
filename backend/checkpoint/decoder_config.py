"""The dimensions and switches of a Llama-family decoder, independent of any checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864), rotate-half layout.

    inv_freq has rotary_dim / 2 entries in fp64, with all scaling applied. cos and sin are multiplied by
    attention_factor, which is 1.0 unless YaRN or LongRoPE changes it.
    """

    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder. Per-layer tuples have num_layers entries."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context_tokens: int
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on q and k before RoPE (Qwen3)."""
    layer_uses_rope: tuple[bool, ...] = ()
    """False for the NoPE layers of SmolLM3."""
    layer_window_tokens: tuple[int | None, ...] = ()
    """Sliding window: a token attends to itself and the window - 1 tokens before it. None is full attention."""
