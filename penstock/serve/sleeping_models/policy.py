"""Decides which models wake and which sleep, from their state, the requests and the memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.shm.memory.model_table import ModelState

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOLDS_MEMORY = (ModelState.STARTING, ModelState.LOADING, ModelState.AWAKE, ModelState.FALLING_ASLEEP)


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model at one moment. Times are seconds of CLOCK_MONOTONIC."""

    state: ModelState
    num_bytes: int
    """Estimate of its memory while it is awake."""
    num_open: int
    """Requests that need it. A model with any never falls asleep."""
    used_s: float
    """Time when it was last needed or, if later, when it woke."""
    asked_s: float
    """Time when an administrator asked that it sleep."""
    wanted_s: float | None
    """Time since when requests wait for it, if it is asleep and may be loaded."""


@dataclass(slots=True)
class Decision:
    """Indices of models."""

    wake: list[int] = field(default_factory=list)
    sleep: list[int] = field(default_factory=list)


def decide(models: Sequence[ModelView], now_s: float, *, idle_s: float, budget_bytes: int | None) -> Decision:
    """Decide which models wake and which sleep.

    idle_s is how long a model that nobody needs stays awake, 0 means forever; budget_bytes None means no limit. Models
    wake in the order in which they were wanted. The first one that does not fit makes the least recently needed ones
    sleep; the others wait behind it, so that a large model is not passed forever.
    """
    decision = Decision()
    idle = [
        index
        for index, model in sorted(enumerate(models), key=lambda item: item[1].used_s)
        if model.state is ModelState.AWAKE and not model.num_open
    ]
    for index in idle:
        used_s = models[index].used_s
        if models[index].asked_s > used_s or (idle_s and now_s - used_s >= idle_s):
            decision.sleep.append(index)
    taken_bytes = sum(model.num_bytes for model in models if model.state in _HOLDS_MEMORY)
    leaving_bytes = sum(model.num_bytes for model in models if model.state is ModelState.FALLING_ASLEEP)
    leaving_bytes += sum(models[index].num_bytes for index in decision.sleep)
    wanted = [(model.wanted_s, index) for index, model in enumerate(models) if model.wanted_s is not None]
    for _, index in sorted(wanted):
        num_bytes = models[index].num_bytes
        if budget_bytes is not None and taken_bytes + num_bytes > budget_bytes:
            missing_bytes = taken_bytes + num_bytes - budget_bytes - leaving_bytes
            decision.sleep += _least_recently_used(models, idle, missing_bytes, without=decision.sleep)
            break
        taken_bytes += num_bytes
        decision.wake.append(index)
    return decision


def _least_recently_used(
    models: Sequence[ModelView], idle: Sequence[int], missing_bytes: int, *, without: Sequence[int]
) -> list[int]:
    """Return the models that must sleep to free the bytes; none if all of them would not be enough."""
    chosen = []
    for index in idle:
        if missing_bytes <= 0:
            break
        if index not in without:
            chosen.append(index)
            missing_bytes -= models[index].num_bytes
    return chosen if missing_bytes <= 0 else []
