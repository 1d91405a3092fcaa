"""The shapes of a decoder's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock.backend.checkpoint.config.tensors import (
    LayerWeights,
    TensorSpec,
    embedding_spec,
    final_norm_specs,
    layer_specs,
    lm_head_spec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig


class WeightShapes:
    """The shapes of weights that are already packed. Implements the interface of `DecoderWeights`. Tensors are on
    torch's meta device, where operations compute only shapes."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config

    def embedding(self, dtype: torch.dtype) -> Tensor:
        return _stacked((embedding_spec(self._config),), dtype)

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor]:
        layout = layer_specs(self._config, index)
        fields: dict[str, Any] = {field: _stacked(specs, dtype) for field, specs in layout.items()}
        return LayerWeights(**fields)

    def final_norm(self, dtype: torch.dtype) -> Tensor:
        return _stacked(final_norm_specs(self._config), dtype)

    def lm_head(self, dtype: torch.dtype) -> Tensor | None:
        return _stacked((lm_head_spec(self._config),), dtype) if self._config.has_own_lm_head else None


def _stacked(specs: tuple[TensorSpec, ...], dtype: torch.dtype) -> Tensor:
    rows = sum(spec.shape[0] for spec in specs)
    return torch.empty(rows, *specs[0].shape[1:], dtype=dtype, device="meta")
