"""The architecture that a config.json means, whatever its spelling, and its text model if it also reads images."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.expert_layers import qwen3_vl_experts
from penstock.backend.checkpoint.config.architectures.families import FAMILIES
from penstock.backend.checkpoint.config.decoder_config import TensorNames
from penstock.backend.checkpoint.config.rope_scaling import RopeAxes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.config.architectures.families import Family


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text models that an architecture may contain."""

    families: dict[str, Family]
    """By model_type of text_config; a missing one means the first. Other values are refused."""
    tie_embeddings: bool
    defaults: dict[str, float] = field(default_factory=dict)
    """Values of keys that files on the hub omit, if HfConfig requires them or the family's default is another."""
    may_be_flat: bool = False
    """Files without text_config have its keys beside the others, as those that are made of GGUF files."""
    axes: RopeAxes | None = None
    """For models whose pictures have positions on three axes."""
    picture_layers: int = 0
    """The default of the number of vision_config's deepstack_visual_indexes, which other architectures do not have."""


_QWEN3_VL_MOE = replace(
    FAMILIES["Qwen3MoeForCausalLM"],
    experts=qwen3_vl_experts,
    names=TensorNames(fused_experts="mlp.experts", fused_takes_turns=False),
)
_QWEN2_VL_AXES = RopeAxes((16, 24, 24), take_turns=False)
_QWEN3_VL_AXES = RopeAxes((24, 20, 20), take_turns=True)
_QWEN35_AXES = RopeAxes((11, 11, 10), take_turns=True)
_QWEN2_VL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_LLAMA_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
"""The defaults of transformers' LlamaConfig. LLaVA's files leave out keys with these values."""
_IDEFICS3 = TextPart({"llama": FAMILIES["LlamaForCausalLM"]}, tie_embeddings=False)
_QWEN3_VL_DEFAULTS = {"rope_theta": 500_000.0}


TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart(
        {"gemma3_text": FAMILIES["Gemma3ForCausalLM"]},
        tie_embeddings=True,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    "Gemma3nForConditionalGeneration": TextPart(
        {"gemma3n_text": FAMILIES["Gemma3nForCausalLM"]},
        tie_embeddings=True,
        defaults={
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
        },
    ),
    "Gemma4ForConditionalGeneration": TextPart(
        {"gemma4_text": FAMILIES["Gemma4ForCausalLM"]},
        tie_embeddings=True,
        defaults={
            "vocab_size": 262_144,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "InternVLForConditionalGeneration": TextPart(
        {
            "qwen2": FAMILIES["Qwen2ForCausalLM"],
            "qwen3": FAMILIES["Qwen3ForCausalLM"],
            "llama": FAMILIES["LlamaForCausalLM"],
        },
        tie_embeddings=True,
    ),
    "LlavaForConditionalGeneration": TextPart(
        {"llama": FAMILIES["LlamaForCausalLM"], "mistral": FAMILIES["MistralForCausalLM"]},
        tie_embeddings=False,
        defaults=_LLAMA_DEFAULTS,
    ),
    "LlavaOnevisionForConditionalGeneration": TextPart({"qwen2": FAMILIES["Qwen2ForCausalLM"]}, tie_embeddings=False),
    "Mistral3ForConditionalGeneration": TextPart(
        {"mistral": FAMILIES["MistralForCausalLM"], "ministral3": FAMILIES["Ministral3ForCausalLM"]},
        tie_embeddings=False,
    ),
    "Qwen2VLForConditionalGeneration": TextPart(
        dict.fromkeys(("qwen2_vl_text", "qwen2_vl"), FAMILIES["Qwen2ForCausalLM"]),
        tie_embeddings=False,
        defaults=_QWEN2_VL_DEFAULTS,
        may_be_flat=True,
        axes=_QWEN2_VL_AXES,
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl"), FAMILIES["Qwen2ForCausalLM"]),
        tie_embeddings=False,
        defaults=_QWEN2_VL_DEFAULTS,
        may_be_flat=True,
        axes=_QWEN2_VL_AXES,
    ),
    "Qwen3_5ForConditionalGeneration": TextPart(
        {"qwen3_5_text": FAMILIES["Qwen3_5ForCausalLM"]}, tie_embeddings=False, may_be_flat=True, axes=_QWEN35_AXES
    ),
    "Qwen3_5MoeForConditionalGeneration": TextPart(
        {"qwen3_5_moe_text": FAMILIES["Qwen3_5MoeForCausalLM"]},
        tie_embeddings=False,
        may_be_flat=True,
        axes=_QWEN35_AXES,
    ),
    "Qwen3VLForConditionalGeneration": TextPart(
        {"qwen3_vl_text": FAMILIES["Qwen3ForCausalLM"]},
        tie_embeddings=False,
        defaults=_QWEN3_VL_DEFAULTS,
        may_be_flat=True,
        axes=_QWEN3_VL_AXES,
        picture_layers=3,
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        {"qwen3_vl_moe_text": _QWEN3_VL_MOE},
        tie_embeddings=False,
        defaults=_QWEN3_VL_DEFAULTS,
        may_be_flat=True,
        axes=_QWEN3_VL_AXES,
        picture_layers=3,
    ),
}


SUPPORTED_ARCHITECTURES = (*FAMILIES, *TEXT_PARTS)


def _spelled(name: str) -> str:
    """Without case and underscores: the first Llamas are LLaMAForCausalLM."""
    return name.lower().replace("_", "")


_KNOWN = {_spelled(name): name for name in SUPPORTED_ARCHITECTURES} | {"yiforcausallm": "LlamaForCausalLM"}
"""By spelling. Yi is a Llama with another name."""


def find_architecture(values: Mapping[str, Any]) -> object:
    """The first of `architectures`, in our spelling if it is a decoder that we know; without one that of model_type.

    What the file says if that means none.
    """
    named = values.get("architectures")
    if isinstance(named, list) and named:
        return _KNOWN.get(_spelled(named[0]), named[0]) if isinstance(named[0], str) else named[0]
    if named:
        return named
    return decoder_of(str(values.get("model_type")).removesuffix("_text"), reads_images="text_config" in values)


def decoder_of(stem: str, *, reads_images: bool = False) -> str | None:
    """The decoder with this name before ForCausalLM, or of a model that also reads images before its own suffix."""
    return _KNOWN.get(_spelled(stem) + ("forconditionalgeneration" if reads_images else "forcausallm"))
