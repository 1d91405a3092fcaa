"""The values of --quantize, and the tensors of a model that they apply to: linears.

Norms and biases stay unquantised: they are a thousandth of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import (
    EMBEDDING,
    INPUT_TABLE,
    LINEARS,
    STACKED_IN_PARTS,
    TensorSpec,
    embedding_spec,
    expected_tensors,
    layer_specs,
    lm_head_spec,
)
from penstock.backend.checkpoint.formats.stored_formats import PLAIN, StoredFormats
from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm, StackedForm, WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import MAX_QUANTIZED_INPUTS
from penstock.backend.checkpoint.weight_forms.stacked_weights import stacked_form
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError

BYTE_GROUP = 32
_TABLE = "inputs_table"
LM_HEAD = "lm_head"
"""Name of the quantised output layer. It is also the embedding where both are tied."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A value of --quantize."""

    name: str
    group_size: int | None
    """Inputs that share a scale in the linears of the layers, which then have 4 bits; None for 8 bits. lm_head and
    tables always have 8 bits."""
    is_float: bool = False
    """The 8 bits are floats, E4M3; otherwise all values are integers."""
    groups_bytes: bool = False
    """8 bits have a scale for each BYTE_GROUP inputs if that divides them; otherwise one per output."""

    def form_of(self, linear: str, inputs: int) -> PackedForm | GroupedForm | Float8Form:
        if self.is_float:
            return Float8Form(None)
        group_size = None if linear == LM_HEAD or linear.endswith(_TABLE) else self.group_size
        if group_size is None and self.groups_bytes and inputs % BYTE_GROUP == 0:
            return GroupedForm(8, BYTE_GROUP, BYTE_GROUP, has_minima=False)
        return PackedForm(group_size)


QUANTIZATIONS = {
    mode.name: mode
    for mode in (
        Quantization("int8", None),
        Quantization("int4", 32),
        Quantization("int4-128", 128),
        Quantization("fp8", None, is_float=True),
    )
}


_CPU_GROUPS = {
    (2, 16, True, ""), (3, 16, False, ""), (4, 32, True, ""), (4, 32, False, ""), (4, 32, False, "iq4"),
    (5, 32, True, ""), (5, 32, False, ""), (6, 16, False, ""),
}  # fmt: skip
"""Bits, group size, whether there are minima, and codebook of groups that the kernels multiply; and any of 8 bits."""


def has_cpu_kernels(form: WeightForm) -> bool:
    match form:
        case StackedForm(parts):
            return all(has_cpu_kernels(part) for part, _ in parts)
        case GroupedForm(bits=8):
            return True
        case GroupedForm(bits, group_size, _, has_minima, codebook):
            return (bits, group_size, has_minima, codebook) in _CPU_GROUPS
    return not isinstance(form, Float8Form)


def find_quantization(name: str) -> Quantization | None:
    """The mode of `PassOptions.quantize`; None for "none". Raises StartupError for another name."""
    if name == "none":
        return None
    if name not in QUANTIZATIONS:
        raise StartupError(f"--quantize is {name}; it must be none, {', '.join(QUANTIZATIONS)}")
    return QUANTIZATIONS[name]


def find_cpu_quantization(name: str) -> Quantization | None:
    """As `find_quantization`, for the CPU. Raises StartupError also for a mode that has no kernels there."""
    quantization = find_quantization(name)
    if quantization is None:
        return None
    if quantization.is_float:
        raise StartupError(f"--quantize is {name}; the CPU has no products with 8-bit floats: use int8, or a GPU")
    return replace(quantization, groups_bytes=True)


def linear_specs(config: DecoderConfig) -> dict[str, tuple[TensorSpec, ...]]:
    """Name of each quantised linear → the checkpoint's tensors that are stacked into it, in order."""
    specs: dict[str, tuple[TensorSpec, ...]] = {}
    if config.tie_embeddings:
        specs[LM_HEAD] = (embedding_spec(config),)
    elif config.has_lm_head:
        specs[LM_HEAD] = (lm_head_spec(config),)
    for index in config.all_layers:
        layout = layer_specs(config, index)
        specs |= {linear_name(index, field): layout[field] for field in LINEARS if field in layout}
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
        group_size = quantization.form_of(name, inputs).group_size
        if group_size is not None and inputs % group_size:
            fitting = (mode for mode in QUANTIZATIONS.values() if inputs % (mode.group_size or 1) == 0)
            smaller = [mode.name for mode in fitting if not mode.is_float]
            raise StartupError(
                f"--quantize is {quantization.name}; {specs[0].name} has {inputs} inputs, not a multiple of "
                f"{group_size}: use {' or '.join(smaller)}"
            )
        if inputs > MAX_QUANTIZED_INPUTS:
            raise StartupError(
                f"--quantize is {quantization.name}; {specs[0].name} has {inputs} inputs, more than the "
                f"{MAX_QUANTIZED_INPUTS} that a quantised product adds exactly: use none"
            )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear, or an embedding, that is quantised in memory."""

    specs: tuple[TensorSpec, ...]
    """The checkpoint's tensors that are stacked into it."""
    form: WeightForm

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return stacked_shape(self.specs)


def packed_linears(
    config: DecoderConfig,
    quantization: Quantization | None,
    formats: StoredFormats = PLAIN,
    keeps: Callable[[WeightForm], bool] = has_cpu_kernels,
) -> list[PackedLinear]:
    """The matrices that are quantised in memory.

    formats are those of matrices that the checkpoint stores quantised. Unless quantization replaces them, they stay so
    in the forms for which keeps is true, the embedding too.
    """
    matrices = linear_specs(config)
    if quantization is None and not config.tie_embeddings:
        matrices[EMBEDDING] = (embedding_spec(config),)
    found = []
    for name, specs in matrices.items():
        form = (
            _stored_form(name, specs, formats, keeps)
            if quantization is None
            else quantization.form_of(name, stacked_shape(specs)[1])
        )
        if form is not None:
            found.append(PackedLinear(specs, form))
    return found


def weight_bytes(
    config: DecoderConfig,
    dtype: Dtype,
    quantization: Quantization | None,
    formats: StoredFormats = PLAIN,
    keeps: Callable[[WeightForm], bool] = has_cpu_kernels,
) -> int:
    """Memory of the loaded weights; weights that are not quantised have dtype. formats and keeps are as in
    `packed_linears`."""
    packed = packed_linears(config, quantization, formats, keeps)
    quantized = {spec.name for linear in packed for spec in linear.specs}
    plain = [math.prod(spec.shape) for spec in expected_tensors(config) if spec.name not in quantized]
    return sum(plain) * dtype.itemsize + sum(linear.form.num_bytes(linear.shape) for linear in packed)


def _stored_form(
    name: str, specs: tuple[TensorSpec, ...], formats: StoredFormats, keeps: Callable[[WeightForm], bool]
) -> WeightForm | None:
    """The form that stacked tensors have in the checkpoint; None if they are dequantised."""
    found: list[WeightForm | None] = []
    for spec in specs:
        is_covered = spec.name not in (EMBEDDING, INPUT_TABLE) or formats.cover_embedding
        matrix = formats.of(spec.name) if is_covered else None
        found.append(None if matrix is None else matrix.packed_form((spec.shape[0], spec.shape[1])))
    in_parts = name.endswith(STACKED_IN_PARTS)
    return stacked_form(found, [spec.shape[0] for spec in specs], keeps, in_parts=in_parts)
