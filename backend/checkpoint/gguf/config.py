"""Makes a config.json from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backend.checkpoint.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.gguf.header import GgufTensor

T = TypeVar("T", int, float, str)

_DTYPES = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A value of general.architecture."""

    name: str
    """In config.json."""
    interleaved_rope: bool = False
    """Rows of q and k are stored so that neighbours rotate together, unlike in Hugging Face checkpoints."""
    offset_norms: bool = False
    """Weights of norms contain the 1 that the architecture adds."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that the metadata lack."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Settings of YaRN that the metadata lack."""
    wide_layers: int | None = None
    """The number of layers of the model size whose scores are divided by √(hidden_size / heads), not by √head_dim."""


_LLAMA = Architecture("LlamaForCausalLM", interleaved_rope=True)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", settings={"norm_topk_prob": False}),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", settings={"norm_topk_prob": True}),
    "phi3": Architecture("Phi3ForCausalLM"),
    "gemma": Architecture("GemmaForCausalLM", offset_norms=True),
    "gemma2": Architecture("Gemma2ForCausalLM", offset_norms=True, wide_layers=46),
    "gemma3": Architecture("Gemma3ForCausalLM", offset_norms=True, wide_layers=62),
    "granite": Architecture("GraniteForCausalLM", interleaved_rope=True),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "command-r": Architecture("CohereForCausalLM"),
    "cohere2": Architecture("Cohere2ForCausalLM"),
    "starcoder2": Architecture("Starcoder2ForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM"),
    "gpt-oss": Architecture("GptOssForCausalLM", settings={"separate_experts": True}, rope={"truncate": False}),
}
_LLAMA_WITH_EXPERTS = replace(_LLAMA, name="MixtralForCausalLM")

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
_INT_KEYS = {
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Keys of config.json, each with the architecture's own key. An architecture reads the keys that it has."""


class Metadata:
    """Typed access to metadata."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        name = self.get("general.architecture", str)
        if name not in ARCHITECTURES:
            raise StartupError(
                f"general.architecture is {shorten(name)}; GGUF files are supported for {', '.join(ARCHITECTURES)}"
            )
        self._prefix = f"{name}."
        self.architecture = ARCHITECTURES[name]
        if self.architecture is _LLAMA and self.own("expert_count", int):
            self.architecture = _LLAMA_WITH_EXPERTS

    def get(self, key: str, kind: type[T]) -> T | None:
        """Raises StartupError for a value of another type."""
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise StartupError(f"{key} is {shorten(value)}; expected {kind.__name__}")
        return value

    def own(self, key: str, kind: type[T]) -> T | None:
        """Read a key of the architecture."""
        return self.get(self._prefix + key, kind)

    def required(self, key: str) -> int:
        value = self.own(key, int)
        if value is None:
            raise StartupError(f"{self._prefix}{key} is missing")
        return value

    def same_in_all_layers(self, key: str) -> int | None:
        """Read a number, or a list of equal numbers for all layers."""
        value = self._values.get(self._prefix + key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise StartupError(f"{self._prefix}{key} is {shorten(value)}; expected the same integer for all layers")
        return value


def make_config(
    values: Mapping[str, Any], tensors: Mapping[str, GgufTensor], rope_factors: Mapping[str, tuple[float, ...]]
) -> dict[str, Any]:
    """config.json without quantization_config. rope_factors: content of one of ROPE_TENSORS, or nothing.

    Raises StartupError naming the key.
    """
    metadata = Metadata(values)
    if EMBEDDING not in tensors:
        raise StartupError(f"tensor {EMBEDDING} is missing")
    heads, context = metadata.required("attention.head_count"), metadata.required("context_length")
    hidden, layers = metadata.required("embedding_length"), metadata.required("block_count")
    embedding, architecture = tensors[EMBEDDING], metadata.architecture
    head_dim = metadata.own("attention.key_length", int)
    if head_dim is None and heads > 0:
        head_dim = hidden // heads
    rotary = metadata.own("rope.dimension_count", int)
    own = {key: metadata.own(name, float) for key, name in _FLOAT_KEYS.items()}
    own |= {key: metadata.own(name, int) or None for key, name in _INT_KEYS.items()}
    return {
        **own,
        **architecture.settings,
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.same_in_all_layers("feed_forward_length") or own["moe_intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.same_in_all_layers("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_theta": metadata.own("rope.freq_base", float) or 10_000.0,
        **_rope_settings(metadata, context, rope_factors),
        "partial_rotary_factor": rotary / head_dim if rotary and head_dim else None,
        "query_pre_attn_scalar": hidden / heads if layers == architecture.wide_layers else head_dim,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "rope_interleave": architecture.interleaved_rope,
        "norms_have_offset": architecture.offset_norms,
        "tie_word_embeddings": LM_HEAD not in tensors,
        "dtype": _DTYPES.get(embedding.type_name, "bfloat16"),
    }


def _rope_settings(metadata: Metadata, context: int, factors: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    original = metadata.own("rope.scaling.original_context_length", int)
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
    kind = metadata.own("rope.scaling.type", str) or "none"
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise StartupError(f"rope.scaling.type is {shorten(kind)}; supported are none, linear and yarn")
    settings: dict[str, Any] = {"rope_type": kind, "factor": metadata.own("rope.scaling.factor", float)}
    if kind == "yarn":
        settings |= {"original_max_position_embeddings": original, **metadata.architecture.rope}
    return {"rope_scaling": settings}


def _longrope(short: tuple[float, ...], long: tuple[float, ...], scale: float | None) -> dict[str, Any]:
    """LongRoPE's settings. scale is the factor of cosines and sines; None to compute it."""
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": scale}
