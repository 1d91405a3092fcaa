"""Weights and `PassSpec` of decoders that return vectors or scores, the same on all devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.backend.checkpoint.config.tensors import LayerWeights
    from penstock.backend.checkpoint.encoders.pooled_decoder import PooledDecoder
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.forward_pass import PassSpec
    from penstock.backend.passes.ops.weights import Weights


@dataclass(frozen=True, slots=True)
class WeightsWithHead:
    """A decoder's weights with another output layer, or none."""

    weights: Weights
    head: Tensor | None

    def embedding(self, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        return self.weights.embedding(dtype)

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor | QuantizedWeight]:
        return self.weights.layer(index, dtype)

    def final_norm(self, dtype: torch.dtype) -> Tensor:
        return self.weights.final_norm(dtype)

    def lm_head(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.head is None else self.head.to(dtype)


def pooled_spec(spec: PassSpec, pooled: PooledDecoder) -> PassSpec:
    """Change a decoder's spec to that of a pooling one."""
    return replace(spec, pooled={pooled.kind: pooled.width}, generates=False, scores_prompts=False)
