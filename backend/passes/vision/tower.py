"""`VisionTower`: the `PictureTower` of a checkpoint, in torch and fp32; on the CPU its blocks by our kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.backend.forward_pass import PassOptions, PassSpec
from penstock.backend.forward_pass.extensions import PICTURE_CACHE_BYTES
from penstock.backend.passes.vision.checkpoint import empty_model, find_family, load_model, read_config
from penstock.backend.passes.vision.families import Grid, VisionFamily
from penstock.backend.passes.vision.native_blocks import kernels_dtype, saved_bytes, use_kernels
from penstock.backend.passes.vision.pixels import Normalization, read_processor
from penstock.shm.messages import MAX_CONTEXT_TOKENS

_CHANNELS = 3
_ROW_VALUES = 10
"""Values of hidden_size that a patch has at the same time in a layer."""


class VisionTower:
    """Encodes a tile at a time, or the patches of one picture, so its memory is that of one."""

    def __init__(self, model: Any, family: VisionFamily, normalization: Normalization, max_picture_bytes: int) -> None:
        self._model = model
        self._family = family
        self._normalization = normalization
        self.max_picture_bytes = max_picture_bytes
        self.embedding_size = int(model.config.get_text_config(decoder=True).hidden_size)
        self._device = next(model.parameters()).device
        self._give_way: Callable[[], None] = lambda: None
        for blocks in model.modules():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    block.register_forward_pre_hook(self._before_block)

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> VisionTower | None:
        """None if the model's pictures are not taken. Raises StartupError."""
        if (family := find_family(model_dir, options, says_why=True)) is None:
            return None
        config, processor = read_config(model_dir), read_processor(model_dir)
        model = load_model(model_dir, config, torch.device(options.device))
        if options.device == "cpu":
            use_kernels(model, config.vision_config, options.cpu_path, kernels_dtype(model_dir, options))
        normalization = Normalization.read(processor, family)
        return cls(model, family, normalization, _limits(config, processor, family)[0])

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        shape = _in_tiles(shape)
        if len(shape) != 4 or shape[1] != _CHANNELS:
            raise ValueError(f"pixels {list(shape)}; this model takes [tiles, {_CHANNELS}, height, width]")
        return self._family.count(self._model, (shape[0], *shape[2:]), grid)

    def encode(self, pixels: NDArray[np.uint8], grid: Grid, give_way: Callable[[], None]) -> NDArray[np.float32]:
        self._give_way = give_way
        with torch.inference_mode():
            tiles = torch.from_numpy(pixels.reshape(_in_tiles(pixels.shape)).copy())
            normalized = self._normalization.apply(tiles).to(self._device)
            rows: NDArray[np.float32] = self._family.encode(self._model, normalized, grid).float().cpu().numpy()
        return rows

    def _before_block(self, _: nn.Module, __: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the device has done what comes before, so a step can go first
        self._give_way()


def _in_tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Also of patches that the image processor flattens, by colour first."""
    if len(shape) == 2 and shape[1] % _CHANNELS == 0:
        return shape[0], _CHANNELS, shape[1] // _CHANNELS, 1
    return shape


def _limits(config: Any, processor: dict[str, Any], family: VisionFamily) -> tuple[int, int]:
    num_bytes, num_patches = family.limits(config, processor)
    return min(num_bytes, 4 * MAX_CONTEXT_TOKENS), num_patches


def with_pictures(spec: PassSpec, model_dir: Path, options: PassOptions) -> PassSpec:
    """The spec of a decoder with its vision tower, if it has one. Raises StartupError."""
    if not spec.generates or (family := find_family(model_dir, options)) is None:
        return spec
    config, processor = read_config(model_dir), read_processor(model_dir)
    (max_picture_bytes, num_patches), vision = _limits(config, processor, family), config.vision_config
    model = empty_model(config)
    weight_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    patch_values = _ROW_VALUES * vision.hidden_size + 2 * getattr(vision, "intermediate_size", 4 * vision.hidden_size)
    if vision.model_type == "pixtral":
        patch_values += num_patches  # transformers makes a mask of all pairs
    workspace_bytes = 4 * num_patches * patch_values + 6 * max_picture_bytes
    if options.device == "cpu":
        weight_bytes -= saved_bytes(model, vision, kernels_dtype(model_dir, options))
        workspace_bytes += PICTURE_CACHE_BYTES
    return replace(
        spec,
        weight_bytes=spec.weight_bytes + weight_bytes,
        workspace_bytes=spec.workspace_bytes + workspace_bytes,
        max_picture_bytes=max_picture_bytes,
        picture_bytes=weight_bytes + workspace_bytes,
        whole_picture_tokens=family.whole_tokens(config, processor),
    )
