"""Architectures that also read images. Only their text models are served."""

from __future__ import annotations

from dataclasses import dataclass, field


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
