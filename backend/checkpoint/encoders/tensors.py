"""The tensors of an encoder: their names and shapes in a checkpoint, and the form that the model uses.

Reads no file, so models with random weights use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.tensors import TensorSpec
from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig, HeadLayer


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """One layer. Linear weights are [outputs, inputs], row-major; biases [outputs]; norms [2 * hidden_size]."""

    qkv: Tensor
    """[3 * hidden_size, hidden_size]: rows of q, then k, then v."""
    output: Tensor
    mlp_in: Tensor
    """[intermediate_size, hidden_size]; of a gated MLP rows of gate, then as many of up."""
    mlp_out: Tensor
    mlp_norm: Tensor
    attention_norm: Tensor | None
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    mlp_in_bias: Tensor | None
    mlp_out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class HeadLayerWeights:
    """weight is None if it is the table of words."""

    weight: Tensor | None
    bias: Tensor | None
    norm: Tensor | None
    """[2 * outputs]"""


class WeightSource(Protocol):
    """A source of unpacked weights, such as `EncoderWeights`. Each call returns a copy."""

    def words(self) -> Tensor: ...

    def table(self, name: str, dtype: torch.dtype) -> Tensor | None: ...

    def layer(self, index: int) -> EncoderLayerWeights: ...

    def embedding_norm(self) -> Tensor: ...

    def relative_norm(self) -> Tensor: ...

    def final_norm(self) -> Tensor | None: ...

    def head_layer(self, layer: HeadLayer) -> HeadLayerWeights: ...


def table_specs(config: EncoderConfig, prefix: str) -> dict[str, TensorSpec]:
    """Return the table tensors, by the argument of `EncoderWeights.table`."""
    names, hidden = config.names, config.hidden_size
    tables = {
        "words": (names.words, config.vocab_size, hidden),
        "positions": (names.positions, config.num_positions, hidden),
        "token_types": (names.token_types, config.num_token_types, hidden),
        "relative_positions": (names.relative_positions, 2 * config.relative_span, hidden),
        "relative_bias": (names.relative_bias, config.num_relative_buckets, config.num_heads),
    }
    return {
        table: TensorSpec(f"{prefix}{name}.weight", (rows, width))
        for table, (name, rows, width) in tables.items()
        if rows
    }


def layer_specs(config: EncoderConfig, prefix: str, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Field of EncoderLayerWeights → the checkpoint's tensors that are stacked into it, in order; () for none."""
    names = config.names
    start, hidden, width = prefix + names.layer.format(index), config.hidden_size, config.intermediate_size
    linears = {
        "qkv": (names.qkv, 3 * hidden, hidden, config.qkv_bias),
        "output": ((names.output,), hidden, hidden, config.output_bias),
        "mlp_in": (names.mlp_in, (1 + config.is_gated) * width, hidden, config.mlp_in_bias),
        "mlp_out": ((names.mlp_out,), hidden, width, config.mlp_out_bias),
    }
    specs: dict[str, tuple[TensorSpec, ...]] = {}
    for field, (tensors, outputs, inputs, biased) in linears.items():
        rows = outputs // len(tensors)
        specs[field] = tuple(TensorSpec(f"{start}{name}.weight", (rows, inputs)) for name in tensors)
        specs[f"{field}_bias"] = tuple(TensorSpec(f"{start}{name}.bias", (rows,)) for name in tensors if biased)
    has_attention_norm = index > 0 or config.first_attention_norm
    norm = norm_specs(start + names.attention_norm, hidden, biased=config.norm_bias)
    specs["attention_norm"] = norm if has_attention_norm else ()
    specs["mlp_norm"] = norm_specs(start + names.mlp_norm, hidden, biased=config.norm_bias)
    return specs


def norm_specs(name: str, width: int, *, biased: bool) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(f"{name}.weight", (width,))
    return (weight, TensorSpec(f"{name}.bias", (width,))) if biased else (weight,)


def linear_specs(layer: HeadLayer) -> tuple[TensorSpec, ...]:
    """The weight, if it is a tensor of its own, and the bias, if there is one."""
    weight = () if layer.weight is None else (TensorSpec(layer.weight, (layer.outputs, layer.inputs)),)
    return weight if layer.bias is None else (*weight, TensorSpec(layer.bias, (layer.outputs,)))
