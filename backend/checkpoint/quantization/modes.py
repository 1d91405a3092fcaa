"""What --quantize offers, and which tensors of a model it applies to: linears.

Norms and biases stay as they are: they are a thousandth of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.quantized_weights import MAX_QUANTIZED_INPUTS, PackedForm
from penstock.backend.checkpoint.tensors import (
    EMBEDDING,
    LINEARS,
    embedding_spec,
    expected_tensors,
    layer_specs,
    lm_head_spec,
)
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    import torch

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
    from penstock.backend.checkpoint.tensors import TensorSpec

LM_HEAD = "lm_head"
"""Name of the quantised output layer, which is the embedding too where both are tied."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A value of --quantize."""

    name: str
    group_size: int | None
    """Inputs that share a scale in the linears of the layers, which then have 4 bits; None for 8 bits and one scale
    per output. lm_head has 8 bits in any case."""

    def group_size_of(self, linear: str) -> int | None:
        return None if linear == LM_HEAD else self.group_size


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
    """Name of each quantised linear → the checkpoint's tensors that are stacked into it, in order. Not of experts."""
    head = embedding_spec(config) if config.tie_embeddings else lm_head_spec(config)
    specs: dict[str, tuple[TensorSpec, ...]] = {LM_HEAD: (head,)}
    for index in range(config.num_layers):
        layout = layer_specs(config, index)
        specs |= {linear_name(index, field): layout[field] for field in LINEARS if field in layout}
    return specs


def linear_name(layer: int, field: str) -> str:
    return f"layers.{layer}.{field}"


def stacked_shape(specs: tuple[TensorSpec, ...]) -> tuple[int, int]:
    """(outputs, inputs)"""
    return sum(spec.shape[0] for spec in specs), specs[0].shape[1]


def check_sizes(quantization: Quantization, config: DecoderConfig) -> None:
    """Raises StartupError if the model has experts, or the groups of inputs do not fit its linears."""
    if config.experts is not None:
        raise StartupError(f"--quantize {quantization.name} does not apply to mixtures of experts yet: use none")
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


def weight_bytes(
    config: DecoderConfig, dtype: torch.dtype, quantization: Quantization | None, formats: StoredFormats = PLAIN
) -> int:
    """Memory of the loaded weights; those that are not quantised have dtype.

    formats: those of linears that the checkpoint stores quantised, which stay so unless quantization replaces them.
    """
    specs = linear_specs(config)
    forms: dict[str, PackedForm] = {}
    for name, stacked in specs.items():
        form = _stored_form(stacked, formats) if quantization is None else PackedForm(quantization.group_size_of(name))
        if form is not None:
            forms[name] = form
    quantized = {spec.name for name in forms for spec in specs[name]}
    plain = [math.prod(spec.shape) for spec in expected_tensors(config) if spec.name not in quantized]
    return sum(plain) * dtype.itemsize + sum(form.num_bytes(stacked_shape(specs[name])) for name, form in forms.items())


def _stored_form(specs: tuple[TensorSpec, ...], formats: StoredFormats) -> PackedForm | None:
    """The form that stacked tensors have in the checkpoint; None if they are dequantised."""
    found = set()
    for spec in specs:
        matrix = formats.of(spec.name) if spec.name != EMBEDDING or formats.cover_embedding else None
        found.add(None if matrix is None else matrix.packed_form((spec.shape[0], spec.shape[1])))
    return found.pop() if len(found) == 1 else None
