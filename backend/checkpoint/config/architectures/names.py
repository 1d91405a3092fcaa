"""The architecture that a config.json means, whatever its spelling, and its text model if it also reads images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text models that an architecture may contain."""

    families: dict[str, str]
    """model_type of text_config → its entry of FAMILIES; a missing one means the first. Other values are refused."""
    tie_embeddings: bool
    defaults: dict[str, int] = field(default_factory=dict)
    """Values of keys that HfConfig requires and files on the hub omit."""


TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart(
        {"gemma3_text": "Gemma3ForCausalLM"},
        tie_embeddings=True,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}, tie_embeddings=False
    ),
}


SUPPORTED_ARCHITECTURES = (*FAMILIES, *TEXT_PARTS)

_SPELLINGS = {name.lower(): name for name in SUPPORTED_ARCHITECTURES} | {"yiforcausallm": "LlamaForCausalLM"}
"""In lower case: the first Llamas are LLaMAForCausalLM. Yi is a Llama with another name."""


def find_architecture(values: Mapping[str, Any]) -> object:
    """The first of `architectures`, in our spelling if it is a decoder that we know; without one that of model_type.

    What the file says if that means none.
    """
    named = values.get("architectures")
    if isinstance(named, list) and named:
        return _SPELLINGS.get(named[0].lower(), named[0]) if isinstance(named[0], str) else named[0]
    if named:
        return named
    return decoder_of(
        str(values.get("model_type")).replace("_", "").removesuffix("text"), reads_images="text_config" in values
    )


def decoder_of(stem: str, *, reads_images: bool = False) -> str | None:
    """The decoder with this name before ForCausalLM, or of a model that also reads images before its own suffix."""
    return _SPELLINGS.get(stem.lower() + ("forconditionalgeneration" if reads_images else "forcausallm"))
