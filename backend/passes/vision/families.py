"""The architectures whose pictures are taken: how pixels become embeddings.

Image tokens have the positions of ordinary tokens, or positions on three axes. They attend to those before them, or to
all of their picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.backend.passes.vision import qwen

Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """config and model are transformers'. Pixels of a picture are [tiles, 3, height, width]; of patches that the image
    processor flattens, which are its tiles, [patches, 3, values, 1]."""

    count: Callable[[Any, tuple[int, int, int], Grid], int]
    """(model, (tiles, height, width), grid) → number of embeddings. Raises ValueError."""
    encode: Callable[[Any, Tensor, Grid], Tensor]
    """(model, normalised pixels, grid) → embeddings [tokens, hidden]."""
    limits: Callable[[Any, dict[str, Any]], tuple[int, int]]
    """(config, the image processor's settings) → the most bytes of one picture's pixels, and the most patches that a
    layer of the tower has at a time."""
    mean_and_std: tuple[tuple[float, ...], tuple[float, ...]] = ((0.5,) * 3, (0.5,) * 3)
    """Of the processor's class, for files that leave them out."""
    whole_tokens: Callable[[Any, dict[str, Any]], int] = lambda *_: 0
    """As limits; see `PassSpec.whole_picture_tokens`."""


_SOFT_TOKENS, _MOST_SOFT_TOKENS = 280, 1120
"""Of Gemma 4's image processor: the default, and the most that it allows."""
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def image_size(config: Any) -> int:
    """Pixels of a tile's side. Gemma 4's tiles are what becomes one token."""
    vision = config.vision_config
    if vision.model_type == "gemma4_vision":
        return int(vision.patch_size * vision.pooling_kernel_size)
    size = vision.image_size
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def patch_size(config: Any) -> int:
    size = config.vision_config.patch_size
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _in_tiles(max_tiles: Callable[[Any, dict[str, Any]], int]) -> Callable[[Any, dict[str, Any]], tuple[int, int]]:
    """Limits of a tower that encodes squares of image_size, one at a time. max_tiles: the most of one picture."""

    def limits(config: Any, processor: dict[str, Any]) -> tuple[int, int]:
        return max_tiles(config, processor) * 3 * image_size(config) ** 2, _side(config) ** 2

    return limits


def _check_tiles(config: Any, tiles: tuple[int, int, int]) -> None:
    side = image_size(config)
    if tiles[1:] != (side, side):
        raise ValueError(f"its tiles are {tiles[1]} × {tiles[2]} pixels; this model takes {side} × {side}")


def _check_one_tile(config: Any, tiles: tuple[int, int, int]) -> None:
    if tiles[0] != 1:
        raise ValueError(f"{tiles[0]} tiles; this model takes 1")
    _check_tiles(config, tiles)


def _side(config: Any) -> int:
    """Patches of a tile's side."""
    return image_size(config) // patch_size(config)


# Idefics 3 and SmolVLM: squares of patches become one token


def _count_idefics3(model: Any, tiles: tuple[int, int, int], _: Grid) -> int:
    _check_tiles(model.config, tiles)
    return int(tiles[0] * (_side(model.config) // model.config.scale_factor) ** 2)


def _encode_idefics3(model: Any, pixels: Tensor, _: Grid) -> Tensor:
    return torch.cat([model.get_image_features(tile[None, None]).pooler_output[0] for tile in pixels])


def _max_tiles_idefics3(config: Any, processor: dict[str, Any]) -> int:
    size = processor.get("size")
    longest = size.get("longest_edge") if isinstance(size, dict) else None
    per_side = -(-longest // image_size(config)) if isinstance(longest, int) and longest > 0 else 4
    return int(per_side**2 + 1)


# InternVL


def _count_internvl(model: Any, tiles: tuple[int, int, int], _: Grid) -> int:
    _check_tiles(model.config, tiles)
    return int(tiles[0] * int(_side(model.config) * model.config.downsample_ratio) ** 2)


def _encode_internvl(model: Any, pixels: Tensor, _: Grid) -> Tensor:
    return torch.cat([model.get_image_features(tile[None]).pooler_output[0] for tile in pixels])


def _max_tiles_internvl(_: Any, processor: dict[str, Any]) -> int:
    patches = processor.get("max_patches")
    return (patches if isinstance(patches, int) and patches > 0 else 12) + 1


# LLaVA, also with Pixtral's tower, which takes any size


def _is_pixtral(config: Any) -> bool:
    return bool(config.vision_config.model_type == "pixtral")


def _count_patches(config: Any, tiles: tuple[int, int, int], merge: int) -> int:
    num_tiles, height, width = tiles
    side, most = patch_size(config) * merge, image_size(config)
    if num_tiles != 1 or height % side or width % side or max(height, width) > most:
        raise ValueError(f"pixels [{num_tiles}, 3, {height}, {width}]; sides are multiples of {side} up to {most}")
    return height // side * (width // side)


def _count_llava(model: Any, tiles: tuple[int, int, int], _: Grid) -> int:
    config = model.config
    if _is_pixtral(config):
        return _count_patches(config, tiles, 1)
    _check_one_tile(config, tiles)
    return int(_side(config) ** 2 + (config.vision_feature_select_strategy == "full"))


def _encode_llava(model: Any, pixels: Tensor, _: Grid) -> Tensor:
    sizes = {"image_sizes": [tuple(pixels.shape[2:])]} if _is_pixtral(model.config) else {}
    features: Tensor = model.get_image_features(pixels, **sizes).pooler_output[0]
    return features


# Mistral 3: Pixtral's tower, and squares of patches become one token


def _count_mistral3(model: Any, tiles: tuple[int, int, int], _: Grid) -> int:
    return _count_patches(model.config, tiles, model.config.spatial_merge_size)


def _encode_mistral3(model: Any, pixels: Tensor, _: Grid) -> Tensor:
    sizes = torch.tensor([pixels.shape[2:]])
    features: Tensor = model.get_image_features(pixels, image_sizes=sizes).pooler_output[0]
    return features


# LLaVA-OneVision: tiles are put together and cut to the picture's sides, which are in the grid


def _pack(model: Any, tiles: Tensor, grid: Grid, newline: Tensor) -> Tensor:
    """tiles [tiles, tokens, width], newline [width]."""
    packed: Tensor = model.pack_image_features(
        [tiles], torch.tensor([grid[1:]]), image_newline=newline, vision_aspect_ratio=model.config.vision_aspect_ratio
    )[0][0]
    return packed


def _count_onevision(model: Any, tiles: tuple[int, int, int], grid: Grid) -> int:
    _check_tiles(model.config, tiles)
    if tiles[0] > 1 and tiles[0] != _expected_tiles(model.config, grid):
        expected = _expected_tiles(model.config, grid)
        raise ValueError(f"{tiles[0]} tiles; a picture of {grid[1]} × {grid[2]} pixels has {expected}, or 1")
    return len(_pack(model, torch.zeros(tiles[0], _side(model.config) ** 2, 1), grid, torch.zeros(1)))


def _expected_tiles(config: Any, grid: Grid) -> int:
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    return int(image_size_to_num_patches(list(grid[1:]), config.image_grid_pinpoints, image_size(config)))


def _encode_onevision(model: Any, pixels: Tensor, grid: Grid) -> Tensor:
    sizes, several = torch.tensor([grid[1:]]), [2]  # with several pictures, each is one tile, and a newline follows
    tiles = [
        model.get_image_features(tile[None, None], sizes, batch_num_images=several).pooler_output[0][:-1]
        for tile in pixels
    ]
    return _pack(model, torch.stack(tiles), grid, model.image_newline)


def _max_tiles_onevision(config: Any, _: dict[str, Any]) -> int:
    return 1 + max(int(height * width) for height, width in config.image_grid_pinpoints) // image_size(config) ** 2


# Gemma 3 and 4


def _count_gemma3(model: Any, tiles: tuple[int, int, int], _: Grid) -> int:
    _check_one_tile(model.config, tiles)
    return int(model.config.mm_tokens_per_image)


def _encode_gemma3(model: Any, pixels: Tensor, _: Grid) -> Tensor:
    features: Tensor = model.get_image_features(pixels).pooler_output[0]
    return features


def _count_gemma4(model: Any, tiles: tuple[int, int, int], _: Grid) -> int:
    num_tiles, height, width = tiles
    side = image_size(model.config)
    if num_tiles != 1 or height % side or width % side:
        raise ValueError(f"pixels [{num_tiles}, 3, {height}, {width}]; sides are multiples of {side}")
    return height // side * (width // side)


def _encode_gemma4(model: Any, pixels: Tensor, _: Grid) -> Tensor:
    side = patch_size(model.config)
    patches = pixels[0].unfold(1, side, side).unfold(2, side, side)  # [3, rows, columns, side, side]
    rows, columns = patches.shape[1:3]
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1).to(pixels.device)
    values = patches.permute(1, 2, 3, 4, 0).reshape(1, rows * columns, -1)
    features: Tensor = model.get_image_features(values, places[None]).pooler_output[0]
    return features


def _max_tiles_gemma4(_: Any, processor: dict[str, Any]) -> int:
    tokens = processor.get("max_soft_tokens")
    return tokens if isinstance(tokens, int) and 0 < tokens <= _MOST_SOFT_TOKENS else _SOFT_TOKENS


def _limits_gemma4(config: Any, processor: dict[str, Any]) -> tuple[int, int]:
    num_bytes, num_patches = _in_tiles(_max_tiles_gemma4)(config, processor)
    return num_bytes, num_patches * _max_tiles_gemma4(config, processor)  # all at once


def _whole_tokens_gemma4(config: Any, processor: dict[str, Any]) -> int:
    text = config.get_text_config(decoder=True)
    return _max_tiles_gemma4(config, processor) if text.use_bidirectional_attention == "vision" else 0


def _one_tile(_: Any, __: dict[str, Any]) -> int:
    return 1


_IDEFICS3 = VisionFamily(_count_idefics3, _encode_idefics3, _in_tiles(_max_tiles_idefics3))
_QWEN = VisionFamily(qwen.count, qwen.encode, qwen.limits, _CLIP)
FAMILIES = {
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Gemma3ForConditionalGeneration": VisionFamily(
        _count_gemma3,
        _encode_gemma3,
        _in_tiles(_one_tile),
        whole_tokens=lambda config, _: int(config.mm_tokens_per_image),
    ),
    "Gemma4ForConditionalGeneration": VisionFamily(
        _count_gemma4,
        _encode_gemma4,
        _limits_gemma4,
        ((0.0,) * 3, (1.0,) * 3),
        _whole_tokens_gemma4,
    ),
    "InternVLForConditionalGeneration": VisionFamily(
        _count_internvl,
        _encode_internvl,
        _in_tiles(_max_tiles_internvl),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
    "LlavaForConditionalGeneration": VisionFamily(_count_llava, _encode_llava, _in_tiles(_one_tile), _CLIP),
    "LlavaOnevisionForConditionalGeneration": VisionFamily(
        _count_onevision, _encode_onevision, _in_tiles(_max_tiles_onevision), _CLIP
    ),
    "Mistral3ForConditionalGeneration": VisionFamily(_count_mistral3, _encode_mistral3, _in_tiles(_one_tile), _CLIP),
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
