"""Files of models that take pictures, as a frontend reads them: a tokenizer with the family's tokens, its template, and
the settings of its processor, with small sizes."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken

from penstock.shm.messages import ModelCard
from tests.frontend.harness import byte_level_tokenizer, model_card

_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}PICTURE{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""PICTURE is what a family's template writes for a picture."""
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's own: it shows content in parts only."""


@dataclass(frozen=True)
class VisionModel:
    module: str
    """Of the processor in transformers."""
    processor_class: str
    image_processor: dict[str, Any]
    tokens: tuple[str, ...]
    picture: str
    """What the template writes for a picture."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the processor."""
    named: dict[str, str] = field(default_factory=dict)
    """Names of tokens that transformers' processor reads from the tokenizer."""
    template: str = ""


_TILED = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
_TAGS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_QWEN = VisionModel(
    "qwen2_vl",
    "Qwen2VLProcessor",
    {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 14,
        "min_pixels": 784,
        "max_pixels": 28**2 * 20,
    },
    _VISION,
    "<|vision_start|><|image_pad|><|vision_end|>",
)
MODELS = {
    "smolvlm": VisionModel(
        "idefics3",
        "Idefics3Processor",  # the same text; SmolVLM's wants packages for videos
        {"image_processor_type": "SmolVLMImageProcessor", **_TILED},
        (*_TAGS, *_ROWS),
        "<image>",
        {"image_seq_len": 4},
        template=SMOLVLM_TEMPLATE,
    ),
    "idefics3": VisionModel(
        "idefics3",
        "Idefics3Processor",
        {"image_processor_type": "Idefics3ImageProcessor", **_TILED},
        (*_TAGS, *_ROWS),
        "<image>",
        {"image_seq_len": 4},
    ),
    "qwen2_5_vl": _QWEN,
    "internvl": VisionModel(
        "internvl",
        "InternVLProcessor",
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 28, "width": 28}, "max_patches": 4},
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        "<IMG_CONTEXT>\n",
        {"image_seq_length": 5},
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "mistral3": VisionModel(
        "pixtral",
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 112}, "patch_size": 14},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "gemma3": VisionModel(
        "gemma3",
        "Gemma3Processor",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "<start_of_image>",
        {"image_seq_length": 4},
        named={
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "gemma4": VisionModel(
        "gemma4",
        "Gemma4Processor",
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
        ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        "<|image|>",
        named={
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    "llava": VisionModel(
        "llava",
        "LlavaProcessor",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
        ("<image>",),
        "<image>\n",
        {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": VisionModel(
        "llava_onevision",
        "LlavaOnevisionProcessor",
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28], [112, 112]],
        },
        ("<image>", "<video>"),
        "<image>\n",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
    ),
}


def save_vision_model(directory: Path, model_type: str) -> ModelCard:
    """Write the files, and return the card of the model."""
    model = MODELS[model_type]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in model.tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "config.json": {"model_type": model_type},
        "preprocessor_config.json": model.image_processor,
        "processor_config.json": {"processor_class": model.processor_class, **model.settings},
    }
    for name, values in files.items():
        (directory / name).write_text(json.dumps(values), encoding="utf-8")
    template = model.template or _TURN.replace("PICTURE", model.picture.replace("\n", "{{ '\\n' }}"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model_card(
        model_dir=str(directory),
        vocab_size=tokenizer.get_vocab_size(),
        max_context_tokens=4000,
        max_picture_bytes=1 << 20,
    )


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()
