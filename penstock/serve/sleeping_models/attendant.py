"""Decides which models wake and which sleep, and starts and ends their backends: the supervisor's attendant."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.process.supervisor import Child, Supervisor, describe_end
from penstock.serve.backend_children import PreparedBackend
from penstock.shm.memory.model_table import ModelState, ModelTable

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
    kept_s: float = 0.0
    """Time until which its last request keeps it, instead of the server's idle time; 0: none said."""


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
        used_s, kept_s = models[index].used_s, models[index].kept_s
        is_over = now_s >= kept_s if kept_s else bool(idle_s) and now_s - used_s >= idle_s
        if models[index].asked_s > used_s or is_over:
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


_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
"""Limit of the pause, which doubles, before a model whose backend cannot start is tried again."""
_LOADS = (ModelState.STARTING, ModelState.LOADING)


@dataclasses.dataclass(slots=True, eq=False)
class SleepingModel:
    """A model, and its backend while it has one. num_bytes is an estimate of its memory while it is awake."""

    name: str
    prepared: PreparedBackend
    num_bytes: int
    child: Child | None = None
    changed_s: float = 0.0
    """CLOCK_MONOTONIC time of the last change of state."""
    wanted_s: float | None = None
    num_failures: int = 0
    """Consecutive failures."""


class ModelAttendant:
    """Wakes models that requests wait for, and puts models to sleep that nobody needs. A sleeping model has
    no process."""

    def __init__(
        self,
        supervisor: Supervisor,
        table: ModelTable,
        models: Sequence[SleepingModel],
        log: Callable[[str], None],
        *,
        idle_s: float,
        budget_bytes: int | None,
    ) -> None:
        """The table's rows are in the order of models. A model in state STARTING is loaded at once."""
        self._supervisor = supervisor
        self._table = table
        self._models = models
        self._log = log
        self._idle_s = idle_s
        self._budget_bytes = budget_bytes

    def note_signal(self) -> None:
        """Do nothing: other commands have no messages for it."""

    def turn(self) -> bool:
        """Look at all models. Always returns True: it wants further turns."""
        for index, model in enumerate(self._models):
            self._follow(index, model)
        now_s = time.monotonic()
        views = [self._view(index, model, now_s) for index, model in enumerate(self._models)]
        decision = decide(views, now_s, idle_s=self._idle_s, budget_bytes=self._budget_bytes)
        for index in decision.sleep:
            if (child := self._models[index].child) is not None:
                self._supervisor.retire(child)
                self._change(index, ModelState.FALLING_ASLEEP)
        for index in decision.wake:
            self._start(index)
            self._change(index, ModelState.LOADING)
        return True

    def _follow(self, index: int, model: SleepingModel) -> None:
        """Note the state of its process."""
        state, child = self._table.state(index), model.child
        if child is None:
            if state is ModelState.STARTING:
                self._start(index)
        elif state in _LOADS and child.end is not None and child.end < 0 and not model.num_failures:
            model.num_failures = 1
            self._log(f"model {model.name}: its backend {describe_end(child.end)} while it was loaded; once more")
            self._supervisor.remove(child)
            self._start(index)
        elif state in _LOADS and child.end is not None:
            self._fail(index, child, child.end)
        elif state in _LOADS and model.prepared.heartbeat.last_ns:
            wake_s = time.monotonic() - child.started_s
            self._supervisor.keep(child, child.spec)
            model.num_failures = 0
            self._log(f"model {model.name} is awake after {wake_s:.2f} s")
            self._change(index, ModelState.AWAKE, wake_s=wake_s)
        elif state is ModelState.FALLING_ASLEEP and child.end is not None:
            self._supervisor.remove(child)
            model.child = None
            model.prepared.drop_weights()
            self._log(f"model {model.name} sleeps after {time.monotonic() - model.changed_s:.2f} s")
            self._change(index, ModelState.ASLEEP)

    def _start(self, index: int) -> None:
        model = self._models[index]
        model.prepared.heartbeat.clear()  # otherwise its last process would seem to be the new one
        model.child = self._supervisor.add(model.prepared.spec(f"model {model.name}"))

    def _fail(self, index: int, child: Child, end: int) -> None:
        model = self._models[index]
        self._supervisor.remove(child)
        model.child, model.wanted_s = None, None
        model.prepared.drop_weights()
        reason = model.prepared.heartbeat.last_words or f"its backend {describe_end(end)}"
        pause_s = min(_FIRST_PAUSE_S * 2**model.num_failures, _LONGEST_PAUSE_S)
        model.num_failures = min(model.num_failures + 1, 16)
        self._log(f"model {model.name} cannot be loaded: {reason}; the next attempt is at least {pause_s:g} s away")
        self._table.fail(index, reason, pause_s)

    def _change(self, index: int, state: ModelState, *, wake_s: float | None = None) -> None:
        model = self._models[index]
        model.changed_s, model.wanted_s = time.monotonic(), None
        self._table.set_state(index, state, wake_s=wake_s)

    def _view(self, index: int, model: SleepingModel, now_s: float) -> ModelView:
        state = self._table.state(index)
        num_open, used_ns, kept_ns = self._table.uses(index)
        may_load = state is ModelState.ASLEEP and num_open and not self._table.seconds_to_retry(index)
        model.wanted_s = (model.wanted_s or now_s) if may_load else None
        used_s, asked_s = max(model.changed_s, used_ns / 1e9), self._table.asked_ns(index) / 1e9
        return ModelView(state, model.num_bytes, num_open, used_s, asked_s, model.wanted_s, kept_ns / 1e9)
