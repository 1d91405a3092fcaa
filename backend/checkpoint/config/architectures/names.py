"""The architecture that a config.json means, whatever its spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.families import FAMILIES
from penstock.backend.checkpoint.config.architectures.text_parts import TEXT_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

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
