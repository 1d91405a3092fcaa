"""Makes a config.json from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.hf_config import MAX_LAYERS
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.gguf.gemma4 import gemma3n_settings, gemma4_settings, proportional_rope
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.gguf.header import GgufTensor
    from penstock.backend.checkpoint.gguf.metadata import Metadata

_DTYPES = {"F32": "float32", "F16": "float16"}


_WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern")
_EXPERTS = ("expert_count", "expert_used_count")
_WIDE_EXPERTS = (*_EXPERTS, "expert_feed_forward_length")
_SHARED_EXPERT = "expert_shared_feed_forward_length"
_RECURRENT = "attention.recurrent_layers"
_MTP_LAYERS = "nextn_predict_layers"
"""Layers after the last, which predict further tokens. The first is read if it has all of the first tensors below, and
none of the others."""
_MTP_TENSORS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm", "attn_q")
_OWN_OF_MTP = ("nextn.embed_tokens", "nextn.shared_head_head")
_DELTA_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_HYBRID = (*_DELTA_SIZES.values(), _RECURRENT, _MTP_LAYERS)
_SECTIONS = "rope.dimension_sections"
DEEPSTACK = "n_deepstack_layers"
"""The number of first layers that pictures add to."""
_OF_PICTURES = (_SECTIONS, DEEPSTACK)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A value of general.architecture."""

    name: str
    """In config.json."""
    keys: tuple[str, ...] = ()
    """Its own keys that change the computation, besides those that any architecture may have."""
    interleaved_rope: bool = False
    """Rows of q and k are stored so that neighbours rotate together, unlike in Hugging Face checkpoints."""
    offset_norms: bool = False
    """Weights of norms contain the 1 that the architecture adds."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that the metadata lack."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Settings of YaRN that the metadata lack."""
    may_have_qkv_bias: bool = False
    """Models differ in biases of q, k and v: the tensors decide."""
    windows_need_key: bool = False
    """No layer has a window if attention.sliding_window is absent."""
    has_layer_sizes: bool = False
    """Layers with and without a window have other sizes (`gemma4_settings`)."""
    has_streams: bool = False
    """Several residual streams (`gemma3n_settings`)."""
    wide_layers: int | None = None
    """The number of layers of the model size whose scores are divided by √(hidden_size / heads), not by √head_dim."""


_LLAMA = Architecture("LlamaForCausalLM", interleaved_rope=True)
_OLMO2 = Architecture("Olmo2ForCausalLM", (*_WINDOWS, "rope.freq_base_swa"))
_QWEN35 = {"plain_decay": True, "tiled_key_heads": True}
_GEMMA_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
        interleaved_rope=True,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved_rope=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        (*_WIDE_EXPERTS, _SHARED_EXPERT),
        settings={"norm_topk_prob": False},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _WIDE_EXPERTS, settings={"norm_topk_prob": True}),
    "qwen2vl": Architecture("Qwen2VLForConditionalGeneration", _OF_PICTURES),
    "qwen3vl": Architecture("Qwen3VLForConditionalGeneration", _OF_PICTURES),
    "qwen3vlmoe": Architecture(
        "Qwen3VLMoeForConditionalGeneration", (*_WIDE_EXPERTS, *_OF_PICTURES), settings={"separate_experts": True}
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        (*_HYBRID, *_WIDE_EXPERTS, _SHARED_EXPERT),
        offset_norms=True,
        settings={"plain_decay": True},
    ),
    "qwen35": Architecture(
        "Qwen3_5ForConditionalGeneration", (*_HYBRID, *_OF_PICTURES), offset_norms=True, settings=_QWEN35
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForConditionalGeneration",
        (*_HYBRID, *_OF_PICTURES, *_WIDE_EXPERTS, _SHARED_EXPERT),
        offset_norms=True,
        settings=_QWEN35,
    ),
    "phi3": Architecture("Phi3ForCausalLM", (_WINDOWS[0], "rope.scaling.attn_factor")),
    "gemma": Architecture("GemmaForCausalLM", offset_norms=True),
    "gemma2": Architecture("Gemma2ForCausalLM", (*_WINDOWS, *_GEMMA_CAPS), offset_norms=True, wide_layers=46),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        (*_WINDOWS, "final_logit_softcapping", "rope.freq_base_swa"),
        offset_norms=True,
        windows_need_key=True,
        wide_layers=62,
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM", (*_WINDOWS, "final_logit_softcapping", "rope.freq_base_swa"), has_streams=True
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", (*_WINDOWS, "final_logit_softcapping", "rope.freq_base_swa"), has_layer_sizes=True
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        interleaved_rope=True,
    ),
    "olmo2": _OLMO2,
    "command-r": Architecture("CohereForCausalLM", ("logit_scale",)),
    "cohere2": Architecture("Cohere2ForCausalLM", ("logit_scale", *_WINDOWS)),
    "starcoder2": Architecture("Starcoder2ForCausalLM", (_WINDOWS[0],)),
    "chatglm": Architecture("GlmForCausalLM", may_have_qkv_bias=True),
    "glm4": Architecture("Glm4ForCausalLM", may_have_qkv_bias=True),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        (*_WIDE_EXPERTS, *_WINDOWS),
        settings={"separate_experts": True},
        rope={"truncate": False},
    ),
}
_LLAMA_WITH_EXPERTS = replace(_LLAMA, name="MixtralForCausalLM", keys=_EXPERTS)
_OLMO3 = replace(_OLMO2, name="Olmo3ForCausalLM")
EMBEDDING, LM_HEAD = "token_embd.weight", "output.weight"
_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
ROPE_TENSORS = ({_ROPE_FACTORS}, {_SHORT_FACTORS, _LONG_FACTORS})
"""Tensors that are settings of the rotary embedding: the first, or both others."""

_FLOAT_KEYS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_NORM_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_INT_KEYS = {
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": _SHARED_EXPERT,
    DEEPSTACK: DEEPSTACK,
    **_DELTA_SIZES,
}
"""Keys of config.json, each with the architecture's own key, which is read if `Architecture.keys` has it."""
_YARN_KEYS = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
}
_YARN_OF_ALL = ("rope.scaling.yarn_attn", "rope.scaling.yarn_beta")
"""Beginnings of the keys that any architecture may have; the others are read if `Architecture.keys` has them."""


def make_config(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], rope_factors: Mapping[str, tuple[float, ...]]
) -> dict[str, Any]:
    """config.json without quantization_config. rope_factors: content of one of ROPE_TENSORS, or nothing.

    Raises StartupError naming the key.
    """
    architecture = _architecture(metadata)
    heads, context = metadata.required("attention.head_count"), metadata.required("context_length")
    hidden, layers = metadata.required("embedding_length"), metadata.required("block_count")
    if not 1 <= layers <= MAX_LAYERS:
        raise StartupError(f"block_count is {layers}; it is from 1 to {MAX_LAYERS}")
    if _MTP_LAYERS in architecture.keys:
        layers -= metadata.own(_MTP_LAYERS, int) or 0
    embedding = tensors[EMBEDDING]
    head_dim = metadata.own("attention.key_length", int)
    if head_dim is None and heads > 0:
        head_dim = hidden // heads
    rotary, theta = metadata.own("rope.dimension_count", int), metadata.own("rope.freq_base", float)
    if theta is None:
        theta = 10_000.0
    metadata.check_equal("attention.value_length", head_dim, "attention.key_length")
    if "rope.freq_base_swa" not in architecture.keys:
        metadata.check_equal("rope.freq_base_swa", theta, "rope.freq_base")
    known = (*architecture.keys, *_NORM_EPSILONS)
    own = {key: metadata.own(name, float) for key, name in _FLOAT_KEYS.items() if name in known}
    own |= {key: metadata.own(name, int) or None for key, name in _INT_KEYS.items() if name in known}
    if architecture is _OLMO3:
        own["rope_local_base_freq"] = own["rope_local_base_freq"] or theta
    sizes = (
        gemma4_settings(metadata, tensors.keys(), embedding.shape[0], layers, head_dim)
        if architecture.has_layer_sizes
        else _sizes(metadata, heads, head_dim, own)
    )
    if architecture.has_streams:
        sizes |= gemma3n_settings(metadata, tensors, layers)
    return {
        **own,
        **sizes,
        **_layer_types(metadata, architecture, layers),
        **architecture.settings,
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": int(_has_mtp(tensors, f"blk.{layers}.")),
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "rope_theta": theta,
        **_rope_settings(metadata, architecture, context, rope_factors),
        "partial_rotary_factor": rotary / head_dim if rotary and head_dim else None,
        "query_pre_attn_scalar": hidden / heads if layers == architecture.wide_layers else head_dim,
        "separate_gates": any(name.endswith(".attn_gate.weight") for name in tensors),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": _has_qkv_bias(tensors) if architecture.may_have_qkv_bias else None,
        "fused_qkv": "blk.0.attn_qkv.weight" in tensors and _RECURRENT not in architecture.keys,
        "rope_interleave": architecture.interleaved_rope,
        "norms_have_offset": architecture.offset_norms,
        "tie_word_embeddings": LM_HEAD not in tensors,
        "dtype": dtype_of(embedding),
    }


def _has_mtp(tensors: Mapping[str, GgufTensor], layer: str) -> bool:
    needed, own = ({f"{layer}{name}.weight" for name in names} for names in (_MTP_TENSORS, _OWN_OF_MTP))
    return needed <= tensors.keys() and own.isdisjoint(tensors)


def _sizes(metadata: Metadata, heads: int, head_dim: int | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of all layers."""
    return {
        "intermediate_size": metadata.same_in_all_layers("feed_forward_length") or own.get("moe_intermediate_size"),
        "num_key_value_heads": metadata.same_in_all_layers("attention.head_count_kv") or heads,
        "head_dim": head_dim,
    }


def dtype_of(embedding: GgufTensor) -> str:
    """The dtype of config.json."""
    return _DTYPES.get(embedding.type_name, "bfloat16")


def _architecture(metadata: Metadata) -> Architecture:
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise StartupError(
            f"general.architecture is {shorten(metadata.architecture)}; GGUF files are supported for "
            f"{', '.join(ARCHITECTURES)}, bert and nomic-bert"
        )
    if found is _LLAMA and metadata.own("expert_count", int):
        return _LLAMA_WITH_EXPERTS
    return _OLMO3 if found is _OLMO2 and metadata.own(_WINDOWS[0], int) else found


def _has_qkv_bias(tensors: Mapping[str, GgufTensor]) -> bool:
    return not tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))


def _layer_types(metadata: Metadata, architecture: Architecture, layers: int) -> dict[str, Any]:
    """Which layers have the window or a delta rule, if the metadata say it."""
    if _RECURRENT in architecture.keys:
        flags, heads = metadata.interval_or_flags(_RECURRENT), metadata.required("ssm.time_step_rank")
        sizes = {"linear_value_head_dim": metadata.required("ssm.inner_size") // max(heads, 1)}
        if not isinstance(flags, list):
            return sizes
        return sizes | {"layer_types": ["linear_attention" if flag else "full_attention" for flag in flags[:layers]]}
    if _WINDOWS[1] not in architecture.keys:
        return {}
    pattern = metadata.interval_or_flags(_WINDOWS[1])
    if architecture.windows_need_key and not metadata.own(_WINDOWS[0], int):
        pattern = [False] * layers
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern]}
    return {"sliding_window_pattern": pattern}


def _rope_settings(
    metadata: Metadata, architecture: Architecture, context: int, factors: Mapping[str, tuple[float, ...]]
) -> dict[str, Any]:
    original = metadata.own("rope.scaling.original_context_length", int)
    kind = metadata.own("rope.scaling.type", str)
    factor = metadata.own("rope.scaling.factor", float) or metadata.own("rope.scale_linear", float)
    if kind is None:
        kind = "linear" if factor else "none"
    if factors and kind not in ("none", "longrope"):
        raise StartupError(f"{metadata.prefix}rope.scaling.type is {shorten(kind)}, and the file has {min(factors)}")
    if _ROPE_FACTORS in factors and architecture.has_layer_sizes:
        return proportional_rope(factors[_ROPE_FACTORS])
    if _ROPE_FACTORS in factors:
        # Frequencies divided by a factor each, such as Llama 3.1's: LongRoPE with the same factors at any length.
        same = factors[_ROPE_FACTORS]
        return {"rope_scaling": _longrope(same, same, 1.0), "original_max_position_embeddings": context}
    if _LONG_FACTORS in factors:
        scale = metadata.own("rope.scaling.attn_factor", float)
        return {
            "rope_scaling": _longrope(factors[_SHORT_FACTORS], factors[_LONG_FACTORS], scale),
            "original_max_position_embeddings": original,
        }
    if kind not in ("none", "linear", "yarn"):
        raise StartupError(f"rope.scaling.type is {shorten(kind)}; supported are none, linear and yarn")
    yarn = {
        key: metadata.own(name, float)
        for key, name in _YARN_KEYS.items()
        if name.startswith(_YARN_OF_ALL) or name in architecture.keys
    }
    # Without settings of their own some families have YaRN in Hugging Face checkpoints.
    settings: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "factor": factor}
    if kind == "yarn":
        mscale = 1.0 if yarn.get("mscale_all_dim") else None
        settings |= {"original_max_position_embeddings": original, "mscale": mscale, **yarn, **architecture.rope}
    if _SECTIONS in architecture.keys and any(sections := metadata.integers(_SECTIONS, 4, default=0)):
        settings["mrope_section"] = sections[:3]
    return {"rope_scaling": {key: value for key, value in settings.items() if value is not None}}


def _longrope(short: tuple[float, ...], long: tuple[float, ...], scale: float | None) -> dict[str, Any]:
    """LongRoPE's settings. scale is the factor of cosines and sines; None to compute it."""
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": scale}
