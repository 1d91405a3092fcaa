"""The encoder of the check, and random weights for it."""

from __future__ import annotations

import torch

from penstock.backend.checkpoint.architectures.encoder_names import EncoderNames
from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig, Head, HeadLayer
from penstock.backend.checkpoint.encoders.tensors import EncoderLayerWeights, HeadLayerWeights

_NAMES = EncoderNames(prefixes=("",))

SMALL_BERT = EncoderConfig(
    architecture="BertModel",
    vocab_size=1000,
    hidden_size=192,
    intermediate_size=768,
    num_layers=3,
    num_heads=6,
    norm_eps=1e-12,
    max_context_tokens=256,
    activation="gelu",
    names=_NAMES,
    heads=(Head("embed", ("mean",), (HeadLayer("dense.weight", "dense.bias", 192, 192, "tanh"),)),),
    num_positions=256,
    num_token_types=2,
)
"""The demo embedding model's dimensions, with fewer words."""


class RandomEncoderWeights:
    """Random weights on the CPU: the same for the same configuration.

    Norms are near 1; matrices are normal with standard deviation 1 / sqrt(inputs).
    """

    def __init__(self, config: EncoderConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed

    def words(self) -> torch.Tensor:
        return self._numbers(0, self._config.vocab_size, self._config.hidden_size)

    def table(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        rows = {"positions": self._config.num_positions, "token_types": self._config.num_token_types}.get(name)
        return self._numbers(len(name), rows, self._config.hidden_size).to(dtype) if rows else None

    def embedding_norm(self) -> torch.Tensor:
        return self._norm(1)

    def relative_norm(self) -> torch.Tensor:
        return self._norm(2)

    def final_norm(self) -> None:
        return None

    def layer(self, index: int) -> EncoderLayerWeights:
        first, hidden, inner = 100 * (index + 1), self._config.hidden_size, self._config.intermediate_size
        return EncoderLayerWeights(
            qkv=self._matrix(first, 3 * hidden, hidden),
            output=self._matrix(first + 1, hidden, hidden),
            mlp_in=self._matrix(first + 2, inner, hidden),
            mlp_out=self._matrix(first + 3, hidden, inner),
            mlp_norm=self._norm(first + 4),
            attention_norm=self._norm(first + 5),
            qkv_bias=self._numbers(first + 6, 3 * hidden) * 0.1,
            output_bias=self._numbers(first + 7, hidden) * 0.1,
            mlp_in_bias=self._numbers(first + 8, inner) * 0.1,
            mlp_out_bias=self._numbers(first + 9, hidden) * 0.1,
        )

    def head_layer(self, layer: HeadLayer) -> HeadLayerWeights:
        return HeadLayerWeights(
            weight=self._matrix(60, layer.outputs, layer.inputs), bias=self._numbers(61, layer.outputs) * 0.1, norm=None
        )

    def _matrix(self, number: int, outputs: int, inputs: int) -> torch.Tensor:
        return self._numbers(number, outputs, inputs).mul_(inputs**-0.5)

    def _norm(self, number: int) -> torch.Tensor:
        """[weight | bias]"""
        hidden = self._config.hidden_size
        return torch.cat([1 + 0.1 * self._numbers(number, hidden), 0.1 * self._numbers(number + 50, hidden)])

    def _numbers(self, number: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self._seed + number)
        return torch.empty(shape).normal_(generator=generator)
