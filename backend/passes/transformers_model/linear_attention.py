"""Layers of transformers' models that keep a state for each sequence: linear attention, with a short convolution.

Such a layer asks its cache for the state before its tokens and gives it the state after them. To it a step is one
sequence, so it is called for each row by itself, and once for all rows of one token, with the states of their slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from penstock.backend.forward_pass import StepBatch

_PROBE_TOKENS = 2
_CHECKED_ROWS = [4, 1, 4]
"""Lengths of the rows in which `check_layers` runs a sequence."""


class UnsupportedStateError(Exception):
    """A layer uses its state in a way that is not supported."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state of one sequence."""

    conv: tuple[int, ...]
    """[channels, width]: the inputs of the convolution at the last tokens."""
    conv_dtype: torch.dtype
    recurrent: tuple[int, ...]
    recurrent_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        conv = torch.Size(self.conv).numel() * self.conv_dtype.itemsize
        return conv + torch.Size(self.recurrent).numel() * self.recurrent_dtype.itemsize


class SlotStates:
    """The states of all slots, in all layers that have one."""

    def __init__(self, shapes: Mapping[int, StateShape], max_slots: int, device: torch.device) -> None:
        """shapes: by layer."""
        self._device = device
        self.layers = {
            layer: (
                torch.zeros(max_slots, *shape.conv, dtype=shape.conv_dtype, device=device),
                torch.zeros(max_slots, *shape.recurrent, dtype=shape.recurrent_dtype, device=device),
            )
            for layer, shape in shapes.items()
        }

    def copy(self, source: int, destination: int) -> None:
        for states in self.layers.values():
            for state in states:
                state[destination] = state[source]

    def begin_step(self, batch: StepBatch) -> StepStates:
        """Reset the state of new slots."""
        new = torch.tensor([init.slot for init in batch.slot_inits], dtype=torch.int64, device=self._device)
        for states in self.layers.values():
            for state in states:
                state[new] = 0
        starts = batch.query_starts.tolist()
        return StepStates(self, starts, torch.from_numpy(batch.slots.astype("int64")).to(self._device))


class StepStates:
    """Runs layers over the rows of one step. Rows of one token come first."""

    def __init__(self, states: SlotStates, starts: list[int], slots: Tensor) -> None:
        """starts: of the rows, then the number of tokens. slots: [R]."""
        self._states = states
        self._slots = slots
        num_single = sum(end - start == 1 for start, end in pairwise(starts))
        parts = [(0, num_single, 0, num_single)] if num_single else []
        parts += [(starts[row], starts[row + 1], row, row + 1) for row in range(num_single, len(slots))]
        self._parts = parts
        """(first token, end, first row, end) of each call."""

    def run(self, forward: Callable[..., Tensor], layer: int, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """hidden_states [1, T, hidden] → the layer's output, of the same shape."""
        outputs = []
        for first, end, first_row, end_row in self._parts:
            cache = _RowCache(*(state[self._slots[first_row:end_row]] for state in self._states.layers[layer]))
            rows = hidden_states[0, first:end].view(end_row - first_row, -1, hidden_states.shape[-1])
            output = forward(hidden_states=rows, cache_params=cache, attention_mask=None, **arguments)
            outputs.append(output.reshape(end - first, -1))
            for state, after in zip(self._states.layers[layer], (cache.conv, cache.recurrent), strict=True):
                state[self._slots[first_row:end_row]] = after.to(state.dtype)
        return torch.cat(outputs).unsqueeze(0)


@dataclass(slots=True)
class _RowCache:
    """Replaces transformers' `Cache` in a layer: conv [n, channels, width], recurrent [n, …]."""

    conv: Tensor
    recurrent: Tensor

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor:
        """The layer may change it in place."""
        _check_index(state_idx)
        return self.conv

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor:
        _check_index(state_idx)
        return self.recurrent

    def update_conv_state(self, inputs: Tensor, _layer: int, conv_kernel_size: int) -> Tensor:
        """Inputs with those before them."""
        known = torch.cat([self.conv, inputs], dim=-1)
        self.conv = known[..., -conv_kernel_size:]
        return known

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> Tensor:  # noqa: ARG002 - passed by name
        self.recurrent = state
        return state

    def is_recording_past(self, _layer: int) -> bool:
        return False


@dataclass(slots=True)
class _StateProbe:
    """A cache without states, which records the layer's values."""

    conv: list[Tensor] = field(default_factory=list)
    recurrent: list[Tensor] = field(default_factory=list)

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> None:
        _check_index(state_idx)

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> None:
        _check_index(state_idx)

    def update_conv_state(self, inputs: Tensor, _layer: int, conv_kernel_size: int) -> Tensor:
        self.conv.append(torch.empty(*inputs.shape[:-1], conv_kernel_size, dtype=inputs.dtype, device=inputs.device))
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> Tensor:  # noqa: ARG002 - passed by name
        self.recurrent.append(state)
        return state

    def is_recording_past(self, _layer: int) -> bool:
        return False


def _check_index(state_idx: int) -> None:
    if state_idx:
        raise UnsupportedStateError("a layer has several states")


def probe_states(model: Module, hidden_size: int, dtype: torch.dtype) -> dict[int, StateShape]:
    """The shapes of the states of a model on the meta device, by layer. Raises UnsupportedStateError."""
    shapes: dict[int, StateShape] = {}
    known: dict[tuple[object, ...], StateShape] = {}
    for layer, module in _stateful_layers(model).items():
        # Layers of one kind are probed once: some take 10 ms each. `check_layers` runs all.
        kind = (type(module), *(parameter.shape for parameter in module.parameters()))
        shapes[layer] = known[kind] = known.get(kind) or _probe_state(layer, module, hidden_size, dtype)
    return shapes


def _probe_state(layer: int, module: Module, hidden_size: int, dtype: torch.dtype) -> StateShape:
    probe = _StateProbe()
    hidden_states = torch.empty(1, _PROBE_TOKENS, hidden_size, dtype=dtype, device="meta")
    module(hidden_states=hidden_states, cache_params=probe, attention_mask=None)
    if len(probe.conv) != 1 or len(probe.recurrent) != 1:
        raise UnsupportedStateError(
            f"layer {layer} has {len(probe.conv)} convolutions and {len(probe.recurrent)} recurrent states"
        )
    conv, recurrent = probe.conv[0], probe.recurrent[0]
    return StateShape(tuple(conv.shape[1:]), conv.dtype, tuple(recurrent.shape[1:]), recurrent.dtype)


def check_layers(
    model: Module, shapes: Mapping[int, StateShape], hidden_size: int, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest difference between a layer's output for a whole sequence and for one in several steps.

    It is a fraction of the largest output. Call it before `run_layers_by_row`.
    """
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(1, sum(_CHECKED_ROWS), hidden_size, generator=generator).to(device, dtype)
    states, slot, largest = SlotStates(shapes, 1, device), torch.zeros(1, dtype=torch.int64, device=device), 0.0
    for layer, module in _stateful_layers(model).items():
        whole = module(hidden_states=hidden_states).float()
        parts = [
            StepStates(states, [0, part.shape[1]], slot).run(module.forward, layer, part)
            for part in torch.split(hidden_states, _CHECKED_ROWS, dim=1)
        ]
        difference = (torch.cat(parts, dim=1).float() - whole).abs().max() / whole.abs().max().clamp(min=1e-6)
        largest = max(largest, difference.item())
    return largest


def run_layers_by_row(model: Module) -> None:
    """From now on, within `states_by`, these layers go through `StepStates.run`."""
    for layer, module in _stateful_layers(model).items():
        module.forward = _by_row(module.forward, layer)


def _by_row(forward: Callable[..., Tensor], layer: int) -> Callable[..., Tensor]:
    def by_row(
        hidden_states: Tensor, cache_params: object = None, attention_mask: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        if (states := _CURRENT.get(None)) is None:
            return forward(hidden_states, cache_params, attention_mask, **arguments)
        return states.run(forward, layer, hidden_states, **arguments)

    return by_row


def _stateful_layers(model: Module) -> dict[int, Module]:
    """By layer. transformers names the argument of such a layer cache_params."""
    return {
        module.layer_idx: module  # type: ignore[misc]
        for module in model.modules()
        if "cache_params" in inspect.signature(module.forward).parameters and hasattr(module, "layer_idx")
    }


_CURRENT: ContextVar[StepStates] = ContextVar("penstock_states")


@contextmanager
def states_by(states: StepStates) -> Iterator[None]:
    """Within the context, layers with a state use these states."""
    token = _CURRENT.set(states)
    try:
        yield
    finally:
        _CURRENT.reset(token)
