"""The shapes of weights that are packed already, in place of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import (
    LayerWeights,
    TensorSpec,
    embedding_spec,
    final_norm_specs,
    layer_specs,
    lm_head_spec,
)
from penstock.backend.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Stands for a tensor that is packed already, in memory that this process maps. It stands for any result of the
    operations below too, of which only the shape is ever needed."""

    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def new_zeros(self, size: int) -> PackedShape:
        return PackedShape((size,))

    new_ones = new_zeros

    def flatten(self, _start: int = 0) -> PackedShape:
        return PackedShape((math.prod(self.shape),))

    def chunk(self, count: int) -> list[PackedShape]:
        return [PackedShape((self.shape[0] // count, *self.shape[1:]))] * count

    def t(self) -> PackedShape:
        return PackedShape(self.shape[::-1])

    def __mul__(self, _factor: float) -> PackedShape:
        return self


class WeightShapes:
    """The shapes of weights that are already packed. Implements the interface of `DecoderWeights`."""

    def __init__(self, config: DecoderConfig, stand_in: Callable[[tuple[int, ...], Dtype], Any]) -> None:
        """stand_in makes what stands for a weight."""
        self._config = config
        self._stand_in = stand_in

    def embedding(self, dtype: Dtype) -> Any:
        return self._stacked((embedding_spec(self._config),), dtype)

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[Any]:
        layout = layer_specs(self._config, index)
        return LayerWeights(**{field: self._stacked(specs, dtype) for field, specs in layout.items()})

    def final_norm(self, dtype: Dtype) -> Any:
        return self._stacked(final_norm_specs(self._config), dtype)

    def lm_head(self, dtype: Dtype) -> Any:
        return self._stacked((lm_head_spec(self._config),), dtype) if self._config.has_own_lm_head else None

    def _stacked(self, specs: tuple[TensorSpec, ...], dtype: Dtype) -> Any:
        return self._stand_in((sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]), dtype)
