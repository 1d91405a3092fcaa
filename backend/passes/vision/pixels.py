"""How a model's image processor rescales and normalises pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.errors import StartupError
from penstock.backend.passes.vision.families import VisionFamily

_FILES = ("preprocessor_config.json", "processor_config.json")
_RESCALE = 1 / 255


def read_processor(model_dir: Path) -> dict[str, Any]:
    """The image processor's settings; empty without a file. Raises StartupError."""
    for name in _FILES:
        if (path := model_dir / name).is_file():
            settings = read_json_object(path)
            own = settings.get("image_processor", settings)
            if not isinstance(own, dict):
                raise StartupError(f"{path}: image_processor is {shorten(own)}; it must be an object")
            if name == _FILES[0] or "image_processor" in settings:
                return own
    return {}


@dataclass(frozen=True, slots=True)
class Normalization:
    rescale: float
    mean: Tensor
    """[3, 1, 1]"""
    std: Tensor

    @classmethod
    def read(cls, processor: dict[str, Any], family: VisionFamily) -> Normalization:
        """Raises StartupError."""
        mean, std = family.mean_and_std
        rescale = _number(processor.get("rescale_factor", _RESCALE), "rescale_factor")
        if processor.get("do_rescale", True) is False:
            rescale = 1.0
        if processor.get("do_normalize", True) is False:
            return cls(rescale, _column((0.0,) * 3, "image_mean"), _column((1.0,) * 3, "image_std"))
        means = _column(processor.get("image_mean") or mean, "image_mean")
        stds = _column(processor.get("image_std") or std, "image_std")
        if not bool((stds > 0).all()):
            raise StartupError(f"image_std is {shorten(stds.flatten().tolist())}; each value must be above 0")
        return cls(rescale, means, stds)

    def apply(self, pixels: Tensor) -> Tensor:
        """uint8 [tiles, 3, height, width] to float32."""
        return (pixels.float() * self.rescale - self.mean) / self.std


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e6 < value < 1e6:
        raise StartupError(f"{name} of the image processor is {shorten(value)}; it must be a number")
    return float(value)


def _column(values: object, name: str) -> Tensor:
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise StartupError(f"{name} of the image processor is {shorten(values)}; it must be three numbers")
    return torch.tensor([_number(value, name) for value in values]).reshape(3, 1, 1)
