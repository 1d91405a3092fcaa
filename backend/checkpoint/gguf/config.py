"""The config.json that a GGUF file's metadata stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backend.checkpoint.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.gguf.header import GgufTensor

T = TypeVar("T", int, float, str)

_DTYPES = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A value of general.architecture."""

    name: str
    """In config.json."""
    interleaved_rope: bool = False
    """Rows of q and k are stored so that neighbours rotate together."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved_rope=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM"),
}
EMBEDDING, LM_HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


class Metadata:
    """Typed access to metadata."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        name = self.get("general.architecture", str)
        if name not in ARCHITECTURES:
            raise StartupError(
                f"general.architecture is {shorten(name)}; GGUF files are supported for {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[name]
        self._prefix = f"{name}."

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
        """A key of the architecture."""
        return self.get(self._prefix + key, kind)

    def required(self, key: str) -> int:
        value = self.own(key, int)
        if value is None:
            raise StartupError(f"{self._prefix}{key} is missing")
        return value

    def same_in_all_layers(self, key: str) -> int | None:
        """A number, or a list of it for each layer."""
        value = self._values.get(self._prefix + key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise StartupError(f"{self._prefix}{key} is {shorten(value)}; expected the same integer for all layers")
        return value


def make_config(
    values: Mapping[str, Any], tensors: Mapping[str, GgufTensor], rope_factors: tuple[float, ...] | None
) -> dict[str, Any]:
    """config.json without quantization_config. rope_factors: content of the tensor ROPE_FACTORS, if there is one.

    Raises StartupError naming the key.
    """
    metadata = Metadata(values)
    if EMBEDDING not in tensors:
        raise StartupError(f"tensor {EMBEDDING} is missing")
    heads, context = metadata.required("attention.head_count"), metadata.required("context_length")
    embedding = tensors[EMBEDDING]
    config = {
        "architectures": [metadata.architecture.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.required("embedding_length"),
        "intermediate_size": metadata.same_in_all_layers("feed_forward_length"),
        "num_hidden_layers": metadata.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.same_in_all_layers("attention.head_count_kv") or heads,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.own("attention.layer_norm_rms_epsilon", float),
        "rope_theta": metadata.own("rope.freq_base", float) or 10_000.0,
        "rope_scaling": _rope_scaling(metadata, context, rope_factors),
        "sliding_window": metadata.own("attention.sliding_window", int),
        "rope_interleave": metadata.architecture.interleaved_rope,
        "tie_word_embeddings": LM_HEAD not in tensors,
        "dtype": _DTYPES.get(embedding.type_name, "bfloat16"),
    }
    head_dim = metadata.own("attention.key_length", int)
    if head_dim is None and heads > 0:
        head_dim = metadata.required("embedding_length") // heads
    rotary = metadata.own("rope.dimension_count", int)
    if rotary is not None and head_dim and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    return config | {"head_dim": head_dim}


def _rope_scaling(metadata: Metadata, context: int, factors: tuple[float, ...] | None) -> dict[str, Any] | None:
    if factors is not None:
        # Frequencies divided by a factor each, such as Llama 3.1's: LongRoPE with the same factors at any length.
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    kind = metadata.own("rope.scaling.type", str) or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise StartupError(f"rope.scaling.type is {shorten(kind)}; supported are none, linear and yarn")
    settings: dict[str, Any] = {"rope_type": kind, "factor": metadata.own("rope.scaling.factor", float)}
    if kind == "yarn":
        settings["original_max_position_embeddings"] = metadata.own("rope.scaling.original_context_length", int)
    return settings
