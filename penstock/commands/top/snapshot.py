"""Sums up a running engine's state: its requests, its tenants, and the rates of the last seconds."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import msgspec

from penstock.shm.recording.events import BackendStarted
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.live_state import EngineEvent, EventKind, LiveRequest, LiveSequence, StepColumn, Wait

WINDOW_S = 10.0


class Sort(enum.StrEnum):
    AGE = "age"
    GENERATED = "generated"
    RATE = "rate"
    PROMPT = "prompt"
    TENANT = "tenant"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Line:
    """One open request."""

    name: str
    """frontend.request, with frontends numbered in the order in which they were seen."""
    tenant: str
    state: str
    age_s: float
    num_prompt: int
    num_cached: int
    num_generated: int
    max_tokens: int
    tokens_per_s: float
    is_running: bool
    request: tuple[int, int] | None = None
    """Frontend and request id; None for a sequence whose requests came before the first record."""


@dataclass(frozen=True, slots=True)
class TenantLine:
    tenant: str
    num_running: int
    num_waiting: int
    num_tokens: int
    """Tokens whose keys and values its running sequences have."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the last `WINDOW_S` seconds, or over the shorter time that the recorder covers."""

    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Computed tokens, given and generated ones."""
    decodes_per_s: float = 0.0
    arrived_per_s: float = 0.0
    ended_per_s: float = 0.0
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    busy: float = 0.0
    """Share of the time in which a step ran."""
    num_dropped: int = 0
    num_preempted: int = 0
    num_cancelled: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    started: BackendStarted | None
    last: StepColumn | None
    now_s: float
    rates: Rates
    lines: list[Line]
    tenants: list[TenantLine]
    steps: list[StepColumn]
    """The latest ones, oldest first."""
    num_running: int
    """Running sequences."""
    num_waiting: int
    """Waiting requests."""
    has_gap: bool


class Meter:
    """Follows one engine."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live
        self._steps: deque[StepColumn] = deque()
        self._events: deque[EngineEvent] = deque()
        self._frontends: dict[int, int] = {}
        self._first_s: float | None = None
        """Time of the first thing that was read."""

    def take(self, now_s: float) -> Snapshot:
        """Read new records. Raises ValueError for damaged ones."""
        live, changes = self._live, self._live.poll()
        times_s = [step.ended_s for step in changes.steps[:1]] + [event.time_s for event in changes.events[:1]]
        if self._first_s is None and times_s:
            self._first_s = min(times_s)
        self._steps += changes.steps
        self._events += changes.events
        while self._steps and self._steps[0].ended_s < now_s - WINDOW_S:
            self._steps.popleft()
        while self._events and self._events[0].time_s < now_s - WINDOW_S:
            self._events.popleft()
        lines = self._lines(now_s)
        return Snapshot(
            live.started,
            live.last,
            now_s,
            self._rates(now_s),
            lines,
            _tenants(live, lines),
            list(self._steps)[-100:],
            sum(sequence.is_running for sequence in live.sequences.values()),
            len(live.waiting()),
            changes.has_gap,
        )

    def _rates(self, now_s: float) -> Rates:
        if self._first_s is None:
            return Rates()
        seconds = min(WINDOW_S, max(now_s - self._first_s, 1e-3))
        counts = {kind: sum(event.kind is kind for event in self._events) for kind in EventKind}
        p50_s, p99_s = _percentiles([step.step_s for step in self._steps])
        return Rates(
            len(self._steps) / seconds,
            sum(step.num_tokens for step in self._steps) / seconds,
            sum(step.num_decodes for step in self._steps) / seconds,
            counts[EventKind.ARRIVED] / seconds,
            counts[EventKind.ENDED] / seconds,
            1e3 * p50_s,
            1e3 * p99_s,
            min(1.0, sum(step.step_s for step in self._steps) / seconds),
            sum(step.num_dropped for step in self._steps),
            counts[EventKind.PREEMPTED],
            counts[EventKind.CANCELLED],
        )

    def _lines(self, now_s: float) -> list[Line]:
        live = self._live
        lines = []
        for request in live.requests.values():
            number = self._frontends.setdefault(request.frontend, len(self._frontends) + 1)
            lines.append(_line(live, request, f"{number}.{request.request_id}", now_s))
        for sequence in live.sequences.values():
            if not sequence.requests:  # it started before the first record
                age_s = max(0.0, now_s - sequence.started_s)
                state = "running" if sequence.is_running else Wait.PREEMPTED.value
                lines.append(Line("?", "?", state, age_s, 0, 0, 0, 0, 0.0, sequence.is_running))
        return lines


def describe(snapshot: Snapshot, sort: Sort) -> dict[str, Any]:
    """Return the snapshot as an object of JSON."""
    started, last = snapshot.started, snapshot.last
    return {
        "backend": None if started is None else msgspec.structs.asdict(started),
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "last_step": None if last is None else last._asdict(),
        "rates": snapshot.rates,
        "tenants": snapshot.tenants,
        "requests": sorted_lines(snapshot.lines, sort),
    }


def sorted_lines(lines: Iterable[Line], sort: Sort) -> list[Line]:
    """Oldest, longest and fastest first; tenants by name; waiting requests before running ones."""
    keys: dict[Sort, Callable[[Line], Any]] = {
        Sort.AGE: lambda line: -line.age_s,
        Sort.GENERATED: lambda line: -line.num_generated,
        Sort.RATE: lambda line: -line.tokens_per_s,
        Sort.PROMPT: lambda line: -line.num_prompt,
        Sort.TENANT: lambda line: line.tenant,
        Sort.STATE: lambda line: line.is_running,
    }
    return sorted(lines, key=keys[sort])


def _line(live: LiveEngine, request: LiveRequest, name: str, now_s: float) -> Line:
    sequence = request.sequence
    is_running = sequence is not None and sequence.is_running
    num_generated, rate = _progress(request, sequence, now_s)
    return Line(
        name,
        request.tenant[:8] or "-",
        _state(request, sequence) if is_running and sequence is not None else live.why_it_waits(request).value,
        max(0.0, now_s - request.arrived_s),
        request.num_prompt_tokens,
        0 if sequence is None else sequence.num_cached,
        num_generated,
        request.max_tokens,
        rate,
        is_running,
        (request.frontend, request.request_id),
    )


def _progress(request: LiveRequest, sequence: LiveSequence | None, now_s: float) -> tuple[int, float]:
    """Return the number of generated tokens, and the rate per second."""
    if sequence is None or request.pooled or sequence.num_computed < request.num_prompt_tokens:
        return 0, 0.0
    num_generated = sequence.num_computed + 1 - request.num_prompt_tokens
    return num_generated, num_generated / max(now_s - sequence.started_s, 1e-3)


def _state(request: LiveRequest, sequence: LiveSequence) -> str:
    if request.pooled:
        return request.pooled
    if sequence.num_computed < request.num_prompt_tokens:
        return f"prefill {100 * sequence.num_computed // request.num_prompt_tokens} %"
    return "coalesced" if request.is_coalesced else "decode"


def _tenants(live: LiveEngine, lines: list[Line]) -> list[TenantLine]:
    computed: dict[str, int] = {}
    for sequence in live.sequences.values():
        if sequence.is_running and sequence.requests:
            tenant = next(iter(sequence.requests.values())).tenant[:8] or "-"
            computed[tenant] = computed.get(tenant, 0) + sequence.num_computed
    tenants = []
    for tenant in dict.fromkeys(line.tenant for line in lines):
        own = [line for line in lines if line.tenant == tenant]
        num_running = sum(line.is_running for line in own)
        rate = sum(line.tokens_per_s for line in own if line.is_running)
        tenants.append(TenantLine(tenant, num_running, len(own) - num_running, computed.get(tenant, 0), rate))
    return sorted(tenants, key=lambda tenant: -tenant.num_tokens)


def _percentiles(values: list[float]) -> tuple[float, float]:
    """Return the 50th and the 99th."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
