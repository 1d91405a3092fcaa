"""The architectures that also read images, of which only the text model is served."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text models that an architecture may contain."""

    families: dict[str, str]
    """model_type of text_config → the entry of FAMILIES that it is; the first without one. Others are other models."""
    tie_embeddings: bool
    defaults: dict[str, int] = field(default_factory=dict)
    """Values of keys that the files on the hub leave out and HfConfig requires."""


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
