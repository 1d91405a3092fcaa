"""What each family of models makes of a picture: its image processor, and the text that stands for the picture.

The text has one image token for each run of the model's vectors, and `counts` the length of each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Expansion:
    """What stands for a picture in the prompt."""

    text: str
    counts: list[int]
    grid: tuple[int, int, int] = (1, 1, 1)
    """As in `penstock.shm.messages.Picture`."""


Outputs = Mapping[str, Any]
"""What an image processor returns for one picture."""


@dataclass(frozen=True, slots=True)
class Family:
    module: str
    """The image processor's module in transformers."""
    class_name: str
    """Its class without ImageProcessorPil."""
    image_token: str
    expand: Callable[[Outputs, Any, Mapping[str, Any], str], Expansion]
    """Arguments: outputs, image processor, settings of the processor's file, image token."""
    arguments: Callable[[Mapping[str, Any], Any, int], dict[str, Any]] = lambda _, __, ___: {}
    """More arguments of the image processor. Arguments: settings of the processor's file, image processor, the most
    bytes of pixels."""
    depends_on_others: bool = False
    """A picture alone in a chat is processed differently."""
    placeholder: str = ""
    """What a template writes for a picture, if it is not the image token."""
    pixels: Callable[[Outputs], Any] = lambda outputs: outputs["pixel_values"]
    """A picture's pixels, also in a batch of one."""

    @property
    def place(self) -> str:
        """What a template writes for a picture."""
        return self.placeholder or self.image_token


def _tiled(outputs: Outputs, _: Any, settings: Mapping[str, Any], token: str) -> Expansion:
    """Idefics3 and SmolVLM: a line for each row of tiles, then the whole picture."""
    ((rows,),), ((columns,),) = outputs["rows"], outputs["cols"]
    fake, count = "<fake_token_around_image>", int(settings.get("image_seq_len", 169))
    lines = [
        "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{token}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    text = "".join(lines) + ("\n" if rows else "") + f"{fake}<global-img>{token}{fake}"
    return Expansion(text, [count] * (rows * columns + 1))


def _qwen(outputs: Outputs, processor: Any, _: Mapping[str, Any], token: str) -> Expansion:
    frames, rows, columns = map(int, outputs["image_grid_thw"][0])
    return Expansion(token, [frames * rows * columns // processor.merge_size**2], (frames, rows, columns))


def _intern(outputs: Outputs, _: Any, settings: Mapping[str, Any], token: str) -> Expansion:
    count = int(settings.get("image_seq_length", 256)) * int(outputs["num_patches"][0])
    return Expansion(f"<img>{token}</img>", [count])


def _cell(settings: Mapping[str, Any]) -> int:
    """Pixels of the side of a square that is one token."""
    return int(settings.get("patch_size", 16)) * int(settings.get("spatial_merge_size", 1))


def _pixtral(outputs: Outputs, _: Any, settings: Mapping[str, Any], token: str) -> Expansion:
    rows, columns = (int(length) // _cell(settings) for length in outputs["image_sizes"][0])
    return Expansion("[IMG_BREAK]".join([token] * rows) + "[IMG_END]", [columns] * rows)


def _llava(outputs: Outputs, _: Any, settings: Mapping[str, Any], token: str) -> Expansion:
    height, width = outputs["pixel_values"][0].shape[-2:]
    cell = int(settings.get("patch_size") or 14)
    count = (height // cell) * (width // cell) + int(settings.get("num_additional_image_tokens") or 0)
    return Expansion(token, [count - _drops_first(settings)])


def _drops_first(settings: Mapping[str, Any]) -> bool:
    """Whether the model uses no class embedding."""
    return settings.get("vision_feature_select_strategy") == "default"


def _onevision(outputs: Outputs, processor: Any, settings: Mapping[str, Any], token: str) -> Expansion:
    """LLaVA-OneVision: the whole picture, and tiles of it without their padding, with a token after each row."""
    height, width = map(int, outputs["image_sizes"][0])
    count = int(settings.get("num_image_tokens") or 729)
    drops_first = _drops_first(settings)
    if len(outputs["pixel_values"][0]) == 1:  # one of several
        return Expansion(token, [count + 1 - drops_first], (1, height, width))
    tile = outputs["pixel_values"][0][0].shape[-1]
    best = _best_resolution(height, width, processor.image_grid_pinpoints)
    side = math.isqrt(count)
    rows, columns = side * (best[0] // tile), side * (best[1] // tile)
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
    most = int(str(settings.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
    ratio = math.sqrt(rows * columns / (most * side**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return Expansion(token, [count + rows * columns + rows - drops_first], (1, height, width))


def _best_resolution(height: int, width: int, candidates: list[list[int]]) -> tuple[int, int]:
    """Return the candidate that keeps most of the picture's pixels, and of these the smallest."""

    def key(candidate: list[int]) -> tuple[int, int]:
        scale = min(candidate[1] / width, candidate[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - candidate[0] * candidate[1]

    best = max(candidates, key=key)
    return best[0], best[1]


def _qwen_size(_: Mapping[str, Any], processor: Any, max_bytes: int) -> dict[str, Any]:
    """The model's limits of a picture's pixels, lowered to the server's."""
    longest = min(processor.size["longest_edge"], max_bytes // (3 * processor.temporal_patch_size))
    return {"size": {"longest_edge": longest, "shortest_edge": min(processor.size["shortest_edge"], longest)}}


def _gemma3(_: Outputs, __: Any, settings: Mapping[str, Any], token: str) -> Expansion:
    text = f"\n\n<start_of_image>{token}<end_of_image>\n\n"
    return Expansion(text, [int(settings.get("image_seq_length", 256))])


def _gemma4(outputs: Outputs, _: Any, __: Mapping[str, Any], token: str) -> Expansion:
    return Expansion(f"<|image>{token}<image|>", [int(outputs["num_soft_tokens_per_image"][0])])


def _gemma4_pixels(outputs: Outputs) -> Any:
    """Put the patches together again: [1, 3, height, width]."""
    values, places = outputs["pixel_values"][0], outputs["image_position_ids"][0]
    columns, rows = (int(length) + 1 for length in places.max(axis=0))
    side = math.isqrt(values.shape[1] // 3)
    patches = values[: rows * columns].reshape(rows, columns, side, side, 3)
    return patches.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * side, columns * side)


def _with_rows(*_: Any) -> dict[str, Any]:
    return {"return_row_col_info": True}


_PIXTRAL = Family(
    "pixtral", "Pixtral", "[IMG]", _pixtral, arguments=lambda settings, *_: {"patch_size": _cell(settings)}
)
_QWEN = Family("qwen2_vl", "Qwen2VL", "<|image_pad|>", _qwen, arguments=_qwen_size)

FAMILIES = {
    "idefics3": Family("idefics3", "Idefics3", "<image>", _tiled, arguments=_with_rows),
    "smolvlm": Family("smolvlm", "SmolVLM", "<image>", _tiled, arguments=_with_rows),
    "gemma3": Family(
        "gemma3",
        "Gemma3",
        "<image_soft_token>",
        _gemma3,
        arguments=lambda *_: {"do_pan_and_scan": False},
        placeholder="<start_of_image>",
    ),
    "gemma4": Family("gemma4", "Gemma4", "<|image|>", _gemma4, pixels=_gemma4_pixels),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "internvl": Family("got_ocr2", "GotOcr2", "<IMG_CONTEXT>", _intern, arguments=lambda *_: {"crop_to_patches": True}),
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "llava": Family("clip", "CLIP", "<image>", _llava),
    "llava_onevision": Family("llava_onevision", "LlavaOnevision", "<image>", _onevision, depends_on_others=True),
}
"""By config.json's model_type."""


def family_name(config: Mapping[str, Any]) -> str:
    """Return the name among FAMILIES for config.json: LLaVA's with Pixtral's tower are Pixtral's."""
    config = config.get("vision_model", config)  # of a GGUF file with its projector
    model_type, vision = str(config.get("model_type")), config.get("vision_config")
    has_pixtral = isinstance(vision, dict) and vision.get("model_type") == "pixtral"
    return "pixtral" if model_type == "llava" and has_pixtral else model_type
