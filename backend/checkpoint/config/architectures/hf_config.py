"""The keys of a Hugging Face config.json that change how a supported model computes, with bounds on every number."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.backend.checkpoint.config.rope_scaling import RopeSettings
from penstock.shm.messages import MAX_CONTEXT_TOKENS

LayerType: TypeAlias = Literal["full_attention", "sliding_attention", "linear_attention"]

_Width = Annotated[int, Meta(ge=1, le=1 << 20)]
_Heads = Annotated[int, Meta(ge=1, le=4096)]
_HeadDim = Annotated[int, Meta(ge=2, le=1024)]
_Positions = Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
_Interval = Annotated[int, Meta(ge=1, le=4096)]
_Experts = Annotated[int, Meta(ge=1, le=4096)]
_PerLayer = Meta(max_length=4096)
_Epsilon = Annotated[float, Meta(gt=0.0, le=1.0)]
_RopeTheta = Annotated[float, Meta(gt=1.0, le=1e15)]
_Scale = Annotated[float, Meta(ge=1e-6, le=1e6)]

MAX_LAYERS = 1024
MAX_STREAMS = 8
"""kMaxStreams of kernels/rows/streams.h."""


class HfConfig(Struct, frozen=True):
    """Keys of a config.json. None and an absent key mean the same, except where the type has UNSET: there null switches
    a feature off."""

    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    hidden_size: _Width
    intermediate_size: _Width
    num_hidden_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_attention_heads: _Heads
    max_position_embeddings: _Positions
    num_key_value_heads: _Heads | None = None
    head_dim: _HeadDim | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    rms_norm_eps: _Epsilon | None = None
    layer_norm_eps: _Epsilon | None = None
    norm_epsilon: _Epsilon | None = None
    norms_have_offset: bool = False
    """Weights of norms already contain the architecture's offset, as in GGUF files of Gemma."""
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    use_bias: bool = True
    use_qk_norm: bool | None = None

    qkv_bias: bool = True
    fused_qkv: bool = False
    """q, k and v are one tensor although the architecture separates them, as in GGUF files of ChatGLM."""

    num_experts: _Experts | None = None
    num_local_experts: _Experts | None = None
    """Another name of num_experts."""
    num_experts_per_tok: _Experts | None = None
    moe_intermediate_size: _Width | None = None
    shared_expert_intermediate_size: _Width | None = None
    norm_topk_prob: bool | None = None
    swiglu_alpha: _Scale | None = None
    swiglu_limit: _Scale | None = None
    separate_experts: bool = False
    """Each expert has its own tensors although the architecture fuses them, as in GGUF files of gpt-oss."""
    decoder_sparse_step: _Interval = 1
    mlp_only_layers: Annotated[tuple[Annotated[int, Meta(ge=0, le=4095)], ...], _PerLayer] | None = None

    rope_parameters: RopeSettings | None = None
    window_rope_parameters: RopeSettings | None = None
    """Never in a file: rope_parameters of sliding_attention, from a file with settings per layer type."""
    rope_scaling: RopeSettings | None = None
    rope_theta: _RopeTheta | None = None
    rope_local_base_freq: _RopeTheta | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    rope_interleave: bool = False
    """Rows of q and k that rotate together are neighbours, as in GGUF files of Llama."""
    original_max_position_embeddings: Annotated[int, Meta(ge=2, le=MAX_CONTEXT_TOKENS)] | None = None

    sliding_window: _Positions | UnsetType | None = UNSET
    sliding_window_pattern: _Interval | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0, le=4096)] = 28
    layer_types: Annotated[tuple[LayerType, ...], _PerLayer] | None = None
    no_rope_layers: Annotated[tuple[Literal[0, 1], ...], _PerLayer] | None = None
    no_rope_layer_interval: _Interval = 4

    full_attention_interval: _Interval = 4
    linear_num_key_heads: _Heads = 16
    linear_num_value_heads: _Heads = 32
    linear_key_head_dim: _HeadDim = 128
    linear_value_head_dim: _HeadDim = 128
    linear_conv_kernel_dim: Annotated[int, Meta(ge=2, le=16)] = 4
    tiled_key_heads: bool = False
    """As in GGUF files of Qwen3.5, as are plain_decay and separate_gates."""
    plain_decay: bool = False
    separate_gates: bool = False
    """Gates of results have their own tensor although the architecture stores them with keys and values."""

    mtp_num_hidden_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS)] | None = None
    mtp_use_dedicated_embeddings: bool = False

    global_head_dim: _HeadDim | None = None
    num_global_key_value_heads: _Heads | None = None
    has_layer_config: bool = False
    """Never in a file: heads of full attention are from per_layer_config, which has those that are not as usual."""
    attention_k_eq_v: bool | None = None
    num_kv_shared_layers: Annotated[int, Meta(ge=0, le=1023)] | None = None
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=4096)] | None = None
    vocab_size_per_layer_input: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    use_bidirectional_attention: bool | str | None = None
    altup_num_inputs: Annotated[int, Meta(ge=2, le=MAX_STREAMS)] | None = None
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    laurel_rank: _Width | None = None
    activation_sparsity_pattern: Annotated[tuple[Annotated[float, Meta(ge=0.0, lt=1.0)], ...], _PerLayer] | None = None
    enable_moe_block: bool = False
    top_k_experts: _Experts | None = None

    query_pre_attn_scalar: _Scale | None = None
    attn_logit_softcapping: _Scale | UnsetType | None = UNSET
    final_logit_softcapping: _Scale | UnsetType | None = UNSET
    embedding_multiplier: _Scale | None = None
    residual_multiplier: _Scale | None = None
    attention_multiplier: _Scale | None = None
    logits_scaling: _Scale | None = None
    logit_scale: _Scale | None = None
