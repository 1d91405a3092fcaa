"""The supported architectures: how each differs from Llama, and its defaults for absent keys of config.json.

A new dense architecture is an entry of FAMILIES and a preset of tests/presets.py, as long as `DecoderConfig` can
express it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.backend.checkpoint.config.architectures.delta_layers import attention_alone, delta_layers
from penstock.backend.checkpoint.config.architectures.expert_layers import (
    ExpertLayers,
    gpt_oss_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
    qwen3_next_experts,
    qwen35_experts,
)
from penstock.backend.checkpoint.config.architectures.gemma4 import (
    GEMMA4_NAMES,
    gemma3n_variations,
    gemma4_experts,
    gemma4_variations,
)
from penstock.backend.checkpoint.config.architectures.layer_patterns import (
    Windows,
    last_layer_whole,
    no_windows,
    rope_at_intervals,
    rope_everywhere,
    rope_within_windows,
    window_everywhere,
    window_everywhere_if_used,
    window_nowhere_unless_given,
    windows_between,
    windows_of_even_first_layers,
    windows_of_last_layers,
    windows_of_nope_layers,
    windows_unless_other_types,
)
from penstock.backend.checkpoint.config.architectures.scales import (
    cohere_scales,
    gemma1_scales,
    gemma3n_scales,
    gemma4_scales,
    gemma_scales,
    granite_scales,
    no_scales,
)
from penstock.backend.checkpoint.config.decoder_config import (
    Activation,
    DeltaNet,
    MlpKind,
    NormKind,
    QkNormScope,
    Scales,
    TensorNames,
)
from penstock.backend.checkpoint.config.rope_scaling import RopeSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _no_variations(*_: object) -> dict[str, Any]:
    return {}


def _no_qk_norm(_: HfConfig) -> QkNormScope | None:
    return None


def no_experts(_: HfConfig) -> ExpertLayers | None:
    return None


def _qk_norm(scope: QkNormScope) -> Callable[[HfConfig], QkNormScope | None]:
    return lambda _: scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture. The functions read the settings that its config.json decides."""

    windows: Callable[[HfConfig], Windows] = no_windows
    uses_rope: Callable[[HfConfig, Windows], tuple[bool, ...]] = rope_everywhere
    scales: Callable[[HfConfig], Scales] = no_scales
    qk_norm: Callable[[HfConfig], QkNormScope | None] = _no_qk_norm
    names: TensorNames = field(default_factory=TensorNames)
    experts: Callable[[HfConfig], ExpertLayers | None] = no_experts
    delta_net: Callable[[HfConfig], DeltaNet | None] = attention_alone
    gated_attention: bool = False
    mtp_layers: int | None = None
    """Default of mtp_num_hidden_layers; None if such layers are not read."""
    key_defaults: dict[str, int] = field(default_factory=dict)
    """Values of keys that HfConfig requires and files may omit."""
    variations: Callable[[HfConfig, int, int], dict[str, Any]] = _no_variations
    """Further fields of DecoderConfig, from the numbers of key heads and of their dimensions."""

    biases: Literal["none", "qkv", "qkv if qkv_bias", "qkv if attention_bias", "attention_bias", "use_bias"] = "none"
    """Which of q, k, v and o have biases; "use_bias" includes the MLP."""
    attention_bias: bool = False
    """Default of the key."""
    mlp_bias_allowed: bool = False
    """Whether the key mlp_bias has a meaning."""

    norm: NormKind = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    eps_key: Literal["rms_norm_eps", "layer_norm_eps", "norm_epsilon"] = "rms_norm_eps"
    norm_eps: float = 1e-6
    activation_key: Literal["hidden_act", "hidden_activation"] = "hidden_act"
    activation: str = "silu"
    """The only supported activation, named as in transformers; also the default."""
    activation_aliases: tuple[str, ...] = ()
    """Other names that mean the same for this architecture."""
    mlp: MlpKind = "gated"
    sinks: bool = False
    parallel_blocks: bool = False

    head_dim: int | None = None
    rope: RopeSettings = RopeSettings()  # noqa: RUF009 - frozen
    """The rotary embedding if config.json has no settings of scaling."""
    rope_theta: float = 10_000.0
    scales_queries: bool = False
    """Queries are scaled by their position if the settings of RoPE have a llama_4_scaling_beta."""
    window_rope_theta: float | None = None
    """If not None, layers with a window have their own rotary embeddings, with this base unless a key gives another."""
    partial_rotary_factor: float = 1.0
    interleaved_rope: bool = False
    tie_embeddings: bool = False
    original_max_positions: int | None = None
    refused_keys: tuple[str, ...] = ()
    """Keys that may change the computation in a way that is not supported, unless their value is false or null."""


def _cohere_qk_norm(config: HfConfig) -> QkNormScope | None:
    return "each head" if config.use_qk_norm else None


_BIDIRECTIONAL = ("use_bidirectional_attention",)
FUSED_QKV = ("self_attn.qkv_proj",)
_FUSED_GATE_UP = ("mlp.gate_up_proj",)
_OLMO_NAMES = TensorNames(
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)
_GEMMA_NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
_GLM_NAMES = TensorNames(gate_up=_FUSED_GATE_UP)
_GLM4_NAMES = TensorNames(
    attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm", gate_up=_FUSED_GATE_UP
)
_COHERE_NAMES = TensorNames(mlp_norm=None)
_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)

_GPT_OSS_NAMES = TensorNames(router="mlp.router", fused_experts="mlp.experts")
_GPT_OSS_ROPE = RopeSettings(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)

_MINISTRAL3_ROPE = RopeSettings(
    rope_type="yarn",
    rope_theta=1_000_000.0,
    factor=16.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=16_384,
    llama_4_scaling_beta=0.1,
)

_GEMMA = Family(
    scales=gemma1_scales,
    biases="attention_bias",
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    activation_aliases=("gelu",),  # the first files say so and mean the other
    head_dim=256,
    tie_embeddings=True,
    refused_keys=_BIDIRECTIONAL,
)
_GEMMA2 = replace(
    _GEMMA,
    windows=windows_between(2),
    scales=gemma_scales(scores_cap=50.0, logits_cap=30.0),
    names=_GEMMA_NAMES,
    activation_key="hidden_activation",
    activation_aliases=(),
)
_GLM = Family(
    names=_GLM_NAMES,
    biases="qkv if attention_bias",
    attention_bias=True,
    norm_eps=1.5625e-7,
    head_dim=128,
    partial_rotary_factor=0.5,
    interleaved_rope=True,
)

_QWEN35 = Family(
    biases="attention_bias",
    qk_norm=_qk_norm("head"),
    norm_offset=1.0,
    gated_attention=True,
    mtp_layers=0,
    delta_net=delta_layers,
    head_dim=256,
    partial_rotary_factor=0.25,
)
_QWEN3_NEXT_NAMES = TensorNames(delta_in=("linear_attn.in_proj_qkvz",), delta_gates=("linear_attn.in_proj_ba",))

FAMILIES = {
    "LlamaForCausalLM": Family(biases="attention_bias", mlp_bias_allowed=True),
    "MistralForCausalLM": Family(windows=window_everywhere),
    "MinistralForCausalLM": Family(windows=windows_unless_other_types),
    "Ministral3ForCausalLM": Family(
        windows=window_nowhere_unless_given,
        norm_eps=1e-5,
        head_dim=128,
        rope=_MINISTRAL3_ROPE,
        scales_queries=True,
    ),
    "Qwen2ForCausalLM": Family(windows=windows_of_last_layers, biases="qkv"),
    "Qwen3ForCausalLM": Family(
        windows=windows_of_last_layers, biases="attention_bias", qk_norm=_qk_norm("head"), head_dim=128
    ),
    "Qwen3MoeForCausalLM": Family(
        windows=window_everywhere_if_used, biases="attention_bias", qk_norm=_qk_norm("head"), experts=qwen3_experts
    ),
    "Qwen2MoeForCausalLM": Family(
        windows=windows_of_even_first_layers, biases="qkv if qkv_bias", experts=qwen2_experts
    ),
    "Qwen3NextForCausalLM": replace(_QWEN35, names=_QWEN3_NEXT_NAMES, experts=qwen3_next_experts, mtp_layers=1),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5MoeForCausalLM": replace(_QWEN35, experts=qwen35_experts, key_defaults={"intermediate_size": 512}),
    "MixtralForCausalLM": Family(
        windows=window_nowhere_unless_given,
        names=_MIXTRAL_NAMES,
        experts=mixtral_experts,
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
    ),
    "GptOssForCausalLM": Family(
        windows=windows_between(2, 128),
        names=_GPT_OSS_NAMES,
        experts=gpt_oss_experts,
        biases="attention_bias",
        attention_bias=True,
        sinks=True,
        norm_eps=1e-5,
        head_dim=64,
        rope=_GPT_OSS_ROPE,
        rope_theta=150_000.0,
    ),
    "SmolLM3ForCausalLM": Family(
        windows=windows_of_nope_layers,
        uses_rope=rope_at_intervals,
        biases="attention_bias",
        mlp_bias_allowed=True,
        rope_theta=2_000_000.0,
        tie_embeddings=True,
    ),
    "Phi3ForCausalLM": Family(
        windows=window_nowhere_unless_given,
        names=TensorNames(qkv=FUSED_QKV, gate_up=_FUSED_GATE_UP),
        norm_eps=1e-5,
        original_max_positions=4096,
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        windows=windows_between(6),
        scales=gemma_scales(),
        qk_norm=_qk_norm("head"),
        rope_theta=1_000_000.0,
        window_rope_theta=10_000.0,
        refused_keys=(*_BIDIRECTIONAL, "attn_logit_softcapping"),
        variations=lambda *_: {"pictures_see_whole": "everywhere"},
    ),
    "Gemma3nForCausalLM": replace(
        _GEMMA2,
        windows=windows_between(5, 512),
        scales=gemma3n_scales,
        qk_norm=_qk_norm("head"),
        variations=gemma3n_variations,
        norm_offset=0.0,
        rope_theta=1_000_000.0,
        window_rope_theta=10_000.0,
        refused_keys=(*_BIDIRECTIONAL, "attn_logit_softcapping"),
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA2,
        windows=last_layer_whole(windows_between(6, 512)),
        scales=gemma4_scales,
        qk_norm=_qk_norm("head"),
        names=GEMMA4_NAMES,
        experts=gemma4_experts,
        variations=gemma4_variations,
        norm_offset=0.0,
        rope=RopeSettings(rope_type="proportional", partial_rotary_factor=0.25),
        rope_theta=1_000_000.0,
        window_rope_theta=10_000.0,
        refused_keys=(),
    ),
    "Olmo2ForCausalLM": Family(
        qk_norm=_qk_norm("projection"), names=_OLMO_NAMES, biases="attention_bias", norm_eps=1e-5
    ),
    "Olmo3ForCausalLM": Family(
        windows=windows_between(4),
        qk_norm=_qk_norm("projection"),
        names=_OLMO_NAMES,
        biases="attention_bias",
        norm_eps=1e-5,
        rope_theta=500_000.0,
        window_rope_theta=500_000.0,
    ),
    "GraniteForCausalLM": Family(scales=granite_scales, biases="attention_bias", mlp_bias_allowed=True),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, names=_GLM4_NAMES),
    "CohereForCausalLM": Family(
        scales=cohere_scales,
        qk_norm=_cohere_qk_norm,
        names=_COHERE_NAMES,
        biases="attention_bias",
        norm="layer",
        eps_key="layer_norm_eps",
        norm_eps=1e-5,
        parallel_blocks=True,
        rope_theta=500_000.0,
        interleaved_rope=True,
        tie_embeddings=True,
    ),
    "Cohere2ForCausalLM": Family(
        windows=windows_between(4),
        uses_rope=rope_within_windows,
        scales=cohere_scales,
        names=_COHERE_NAMES,
        biases="attention_bias",
        norm="layer",
        eps_key="layer_norm_eps",
        norm_eps=1e-5,
        parallel_blocks=True,
        interleaved_rope=True,
        tie_embeddings=True,
    ),
    "Starcoder2ForCausalLM": Family(
        windows=window_nowhere_unless_given,
        names=TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        biases="use_bias",
        norm="layer",
        norm_bias=True,
        eps_key="norm_epsilon",
        norm_eps=1e-5,
        activation="gelu_pytorch_tanh",
        mlp="plain",
        tie_embeddings=True,
    ),
}
