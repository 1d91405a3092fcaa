"""Quantised matrices whose outputs are stacked into one linear: q, k and v, gate and up, or blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, StackedForm, WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    BlockWeight,
    GroupedWeight,
    QuantizedWeight,
    SimpleWeight,
    StackedWeight,
)
from penstock.backend.lazy_torch import Tensor

PART_OUTPUTS = 64
"""The outputs of a part of a `StackedWeight` are a multiple of this."""


def stacked_form(
    forms: Sequence[WeightForm | None],
    outputs: Sequence[int],
    keeps: Callable[[WeightForm], bool],
    *,
    in_parts: bool,
) -> WeightForm | None:
    """The form, of those that keeps accepts, that holds the numbers of matrices with these forms and outputs.

    The form that all share, or with in_parts each its own, or the smallest that holds all; None if there is none.
    """
    known = [form for form in forms if form is not None]
    if len(known) < len(forms):
        return None
    candidates: list[WeightForm | None] = [known[0]] if len(set(known)) == 1 else [common_form(known)]
    if in_parts and len(set(known)) > 1 and not any(count % PART_OUTPUTS for count in outputs):
        candidates.insert(0, StackedForm(tuple(zip(known, outputs, strict=True))))
    return next((form for form in candidates if form is not None and keeps(form)), None)


def common_form(forms: Iterable[WeightForm]) -> GroupedForm | None:
    """The smallest form that holds the numbers of all these different forms; None if there is none."""
    found = set(forms)
    grouped = [form for form in found if isinstance(form, GroupedForm)]
    if len(grouped) < len(found) or len({form.block_size for form in grouped}) > 1:
        return None
    group_size, has_minima = min(form.group_size for form in grouped), any(form.has_minima for form in grouped)
    return GroupedForm(8, group_size, grouped[0].block_size, has_minima)


def take_rows(weight: QuantizedWeight, rows: Tensor | slice) -> QuantizedWeight:
    """The weights of some outputs; of a `StackedWeight` all, in another order within each part."""
    if isinstance(weight, StackedWeight):
        if isinstance(rows, slice):
            raise TypeError("a stacked weight is not cut")
        first, ordered = 0, []
        for part in weight.weights:
            own = rows[first : first + part.shape[0]]
            if int(own.min()) < first or int(own.max()) >= first + part.shape[0]:
                raise ValueError("an output would leave its part")
            ordered.append(part.with_parts(*(tensor[own - first] for tensor in part.parts)))
            first += part.shape[0]
        return StackedWeight(tuple(ordered))
    return weight.with_parts(*(part[rows] for part in weight.parts))


def decoded(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight without blocks of GGML, for operations that do not read them."""
    if isinstance(weight, StackedWeight):
        return StackedWeight(tuple(_decoded(part) for part in weight.weights))
    return _decoded(weight)


def _decoded(weight: SimpleWeight) -> SimpleWeight:
    return weight.decode() if isinstance(weight, BlockWeight) else weight


def stack_weights(
    weights: Iterable[QuantizedWeight | None], form: WeightForm, num_outputs: int
) -> QuantizedWeight | None:
    """Join the outputs of all weights, num_outputs together, in order; None if the form cannot hold one of them.

    The result's memory is allocated when the first weight is there; each weight is dropped before the next is
    requested.
    """
    if isinstance(form, StackedForm):
        parts = tuple(_simple_weights(weights))
        return (
            StackedWeight(parts) if StackedForm(tuple((part.form, part.shape[0]) for part in parts)) == form else None
        )
    stacked: list[Tensor] = []
    first: SimpleWeight | None = None
    first_row = 0
    for weight in _simple_weights(_in_form(weight, form) for weight in weights):
        rows = weight.shape[0]
        if rows == num_outputs:
            return weight
        if first is None:
            first = weight
            stacked = [part.new_empty(num_outputs, *part.shape[1:]) for part in weight.parts]
        for target, part in zip(stacked, weight.parts, strict=True):
            target[first_row : first_row + rows] = part
        first_row += rows
    return first.with_parts(*stacked) if first is not None and first_row == num_outputs else None


def _simple_weights(weights: Iterable[QuantizedWeight | None]) -> Iterator[SimpleWeight]:
    """The weights up to the first that is missing or stacked itself."""
    for weight in weights:
        if weight is None or isinstance(weight, StackedWeight):
            return
        yield weight


def _in_form(weight: QuantizedWeight | None, form: WeightForm) -> QuantizedWeight | None:
    if weight is None or weight.form == form:
        return weight
    own = decoded(weight)
    return own.widen(form) if isinstance(own, GroupedWeight) and isinstance(form, GroupedForm) else None
