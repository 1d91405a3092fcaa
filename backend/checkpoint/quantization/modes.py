"""What --quantize offers, and which tensors of a model it applies to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.quantized_weights import MAX_QUANTIZED_INPUTS
from penstock.backend.checkpoint.tensors import embedding_spec, expected_tensors, layer_specs, lm_head_spec
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    import torch

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.tensors import TensorSpec

LINEARS = ("qkv", "o", "gate_up", "down")
"""The quantised fields of LayerWeights. Norms and biases stay as they are: they are a thousandth of a model."""
LM_HEAD = "lm_head"
"""Name of the quantised output layer, which is the embedding too where both are tied."""

_SCALE_BYTES_INT8 = 4
_SCALE_BYTES_INT4 = 2
_ZERO_BYTES_INT4 = 1


@dataclass(frozen=True, slots=True)
class Quantization:
    """A value of --quantize."""

    name: str
    group_size: int | None
    """Inputs that share a scale in the linears of the layers, which then have 4 bits; None for 8 bits and one scale
    per output. lm_head has 8 bits in any case."""

    def group_size_of(self, linear: str) -> int | None:
        return None if linear == LM_HEAD else self.group_size

    def num_bytes(self, linear: str, shape: tuple[int, int]) -> int:
        """Memory of a quantised linear: values, scales and zeros."""
        outputs, inputs = shape
        group_size = self.group_size_of(linear)
        if group_size is None:
            return outputs * (inputs + _SCALE_BYTES_INT8)
        return outputs * (inputs // 2 + inputs // group_size * (_SCALE_BYTES_INT4 + _ZERO_BYTES_INT4))


QUANTIZATIONS = {
    mode.name: mode for mode in (Quantization("int8", None), Quantization("int4", 32), Quantization("int4-128", 128))
}


def find_quantization(name: str) -> Quantization | None:
    """The mode of `PassOptions.quantize`; None for "none". Raises StartupError for another name."""
    if name == "none":
        return None
    if name not in QUANTIZATIONS:
        raise StartupError(f"--quantize is {name}; it must be none, {', '.join(QUANTIZATIONS)}")
    return QUANTIZATIONS[name]


def linear_specs(config: DecoderConfig) -> dict[str, tuple[TensorSpec, ...]]:
    """Name of each quantised linear → the checkpoint's tensors that are stacked into it, in order."""
    head = embedding_spec(config) if config.tie_embeddings else lm_head_spec(config)
    specs: dict[str, tuple[TensorSpec, ...]] = {LM_HEAD: (head,)}
    for index in range(config.num_layers):
        layout = layer_specs(config, index)
        specs |= {linear_name(index, field): layout[field] for field in LINEARS}
    return specs


def linear_name(layer: int, field: str) -> str:
    return f"layers.{layer}.{field}"


def stacked_shape(specs: tuple[TensorSpec, ...]) -> tuple[int, int]:
    """(outputs, inputs)"""
    return sum(spec.shape[0] for spec in specs), specs[0].shape[1]


def check_sizes(quantization: Quantization, config: DecoderConfig) -> None:
    """Raises StartupError if the groups of inputs do not fit the model's linears."""
    for name, specs in linear_specs(config).items():
        _, inputs = stacked_shape(specs)
        group_size = quantization.group_size_of(name)
        if group_size is not None and inputs % group_size:
            smaller = [mode.name for mode in QUANTIZATIONS.values() if inputs % (mode.group_size or 1) == 0]
            raise StartupError(
                f"--quantize is {quantization.name}; {specs[0].name} has {inputs} inputs, not a multiple of "
                f"{group_size}: use {' or '.join(smaller)}"
            )
        if inputs > MAX_QUANTIZED_INPUTS:
            raise StartupError(
                f"--quantize is {quantization.name}; {specs[0].name} has {inputs} inputs, more than the "
                f"{MAX_QUANTIZED_INPUTS} that a quantised product adds exactly: use none"
            )


def weight_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Memory of the loaded weights; those that are not quantised have dtype."""
    linears = {} if quantization is None else linear_specs(config)
    quantized = {spec.name for specs in linears.values() for spec in specs}
    plain = [math.prod(spec.shape) for spec in expected_tensors(config) if spec.name not in quantized]
    num_bytes = sum(plain) * dtype.itemsize
    if quantization is not None:
        num_bytes += sum(quantization.num_bytes(name, stacked_shape(specs)) for name, specs in linears.items())
    return num_bytes
