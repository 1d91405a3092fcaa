"""Qwen2-VL to Qwen3.6: pixels are any number of patches, of which each square becomes one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.backend.forward_pass.extensions import PICTURE_CACHE_BYTES

_CHANNELS = 3
_MAX_TOKENS = 4096
"""Of one picture; the frontend makes larger ones smaller. Files allow 16,384, whose tower takes gigabytes."""
_LONGEST_EDGE = 28 * 28 * 1280
"""Pixels of a picture in transformers' processor, for files that leave them out."""


def _number(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def count(model: Any, tiles: tuple[int, int, int], grid: tuple[int, int, int]) -> int:
    vision = model.config.vision_config
    frames, rows, columns = grid
    side = vision.spatial_merge_size
    values = _number(vision.temporal_patch_size) * _number(vision.patch_size) ** 2
    if frames != 1 or rows % side or columns % side or tiles != (rows * columns, values, 1):
        raise ValueError(
            f"{tiles[0]} patches of {tiles[1] * tiles[2]} values for each colour in a grid of {grid}; this model takes "
            f"patches of {values} values, 1 frame, and rows and columns that are multiples of {side}"
        )
    return int(rows * columns // side**2)


def encode(model: Any, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Each row is an embedding, and what Qwen3-VL adds behind the first layers."""
    features = model.get_image_features(pixels.flatten(1), torch.tensor([grid], device=pixels.device))
    added = getattr(features, "deepstack_features", None) or ()
    return torch.cat([part[0] for part in (features.pooler_output, *added)], dim=1)


def limits(config: Any, processor: dict[str, Any]) -> tuple[int, int]:
    vision, size = config.vision_config, processor.get("size")
    longest = processor.get("max_pixels") or (size.get("longest_edge") if isinstance(size, dict) else None)
    if not isinstance(longest, int) or longest <= 0:
        longest = _LONGEST_EDGE
    num_rows = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    row_bytes = 4 * config.get_text_config(decoder=True).hidden_size * num_rows
    patches_per_token = vision.spatial_merge_size**2
    patch_pixels = _number(vision.patch_size) ** 2
    num_tokens = min(longest // (patches_per_token * patch_pixels), _MAX_TOKENS, PICTURE_CACHE_BYTES // row_bytes)
    num_patches = max(1, num_tokens) * patches_per_token
    return num_patches * _CHANNELS * _number(vision.temporal_patch_size) * patch_pixels, num_patches
