"""What a forward pass reads its weights from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.backend.checkpoint.config.tensors import LayerWeights
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight


class Weights(Protocol):
    """A source of unpacked weights, such as `checkpoint.weights.DecoderWeights`. Each call returns a copy.

    Matrices of linears may be quantised; then so is an embedding table that serves as the output layer too.
    """

    def embedding(self, dtype: torch.dtype) -> Tensor | QuantizedWeight: ...

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor | QuantizedWeight]: ...

    def final_norm(self, dtype: torch.dtype) -> Tensor: ...

    def lm_head(self, dtype: torch.dtype) -> Tensor | QuantizedWeight | None:
        """None if the embedding table serves as the output layer too."""
        ...
