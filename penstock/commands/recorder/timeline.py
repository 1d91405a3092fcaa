"""Writes a recording as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is the Trace Event Format: complete slices (X), asynchronous ones (b, e), instants (i), counters (C) and
names of tracks (M). Times are microseconds since the first record.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeAlias

from penstock.commands.recorder.history import Life, Step, sequences_of
from penstock.shm.messages import FailureCode, Finish
from penstock.shm.recording.events import (
    Arrived,
    Cancelled,
    Ended,
    FrontendDied,
    Joined,
    Left,
    Preempted,
    Started,
    StepFailed,
)
from penstock.shm.recording.steps import Row

TraceEvent: TypeAlias = dict[str, Any]

_LOOP, _DEVICE = 1, 2
_PLAN_WAITS = "executor: plans that wait"
"""Perfetto draws asynchronous slices of one name and process together, if their ids are local to it (`id2`)."""
_PROCESSES_PER_LIFE = 3


def make_trace(lives: list[Life]) -> dict[str, Any]:
    """The trace as JSON values."""
    begin_s = min((life.began_s for life in lives if life.began_s), default=0.0)
    events: list[TraceEvent] = []
    for number, life in enumerate(lives):
        events += _LifeTrace(life, number, begin_s).events()
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _LifeTrace:
    """Three processes of the trace for each backend: the backend, its sequences, and its frontends."""

    def __init__(self, life: Life, number: int, begin_s: float) -> None:
        self._life = life
        self._begin_s = begin_s
        first = 1 + number * _PROCESSES_PER_LIFE
        self._backend, self._sequences, self._frontends = range(first, first + _PROCESSES_PER_LIFE)
        self._arrived_s = {
            (event.frontend, event.request_id): time_s for time_s, event in life.events if isinstance(event, Arrived)
        }

    def events(self) -> Iterator[TraceEvent]:
        steps = list(self._life.steps.values())
        yield from self._names()
        for step in steps:
            yield from self._step(step)
        yield from self._turns(steps)
        yield from self._requests()
        yield from self._happenings()
        for sequence, rows in sequences_of(steps).items():
            yield from self._sequence(sequence, rows)

    def _names(self) -> Iterator[TraceEvent]:
        started = self._life.started
        backend = "backend" if started is None else f"backend {started.pid} ({started.model})"
        for process, name in (
            (self._backend, backend),
            (self._sequences, f"sequences of {backend}"),
            (self._frontends, f"frontends of {backend}"),
        ):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        for track, name in ((_LOOP, "loop"), (_DEVICE, "device")):
            yield self._track_name(self._backend, track, name)
        frontends = {event.frontend for _, event in self._life.events if isinstance(event, Arrived)}
        for frontend in sorted(frontends):
            yield self._track_name(self._frontends, frontend, f"frontend {frontend}")

    @staticmethod
    def _track_name(process: int, track: int, name: str) -> TraceEvent:
        return {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}

    def _us(self, time_s: float) -> float:
        return round(1e6 * max(0.0, time_s - self._begin_s), 3)

    def _slice(
        self, process: int, track: int, name: str, begin_s: float, end_s: float, args: dict[str, Any]
    ) -> TraceEvent:
        begin_us = self._us(begin_s)
        length_us = round(max(0.0, self._us(end_s) - begin_us), 3)
        where = {"pid": process, "tid": track}
        return {"ph": "X", "name": name, "ts": begin_us, "dur": length_us, **where, "args": args}

    def _step(self, step: Step) -> Iterator[TraceEvent]:
        plan = step.plan
        for name, values in (
            ("sequences", {"running": plan.num_running, "waiting": plan.num_waiting}),
            ("pages", {"held": plan.pages_held, "idle": plan.pages_idle}),
        ):
            yield {"ph": "C", "name": name, "ts": self._us(step.planned_s), "pid": self._backend, "args": values}
        if step.ended_s is None:
            where = {"pid": self._backend, "tid": _DEVICE, "ts": self._us(step.planned_s)}
            yield {"ph": "i", "s": "p", "name": f"step {plan.step} has no result", **where}
            return
        began_s = step.ended_s - step.step_s
        args = {
            "step": plan.step,
            "decode rows": plan.num_decodes,
            "other rows": plan.num_chunks,
            "tokens": plan.num_tokens,
            "dropped rows": len(step.dropped_slots),
        }
        name = "failed step" if step.is_failed else "prefill step" if plan.num_chunks else "decode step"
        yield self._slice(self._backend, _DEVICE, name, began_s, step.ended_s, args)
        waits = {
            "cat": "plan",
            "id2": {"local": str(plan.step)},
            "name": _PLAN_WAITS,
            "pid": self._backend,
            "tid": _DEVICE,
        }
        yield {"ph": "b", "ts": self._us(step.planned_s), **waits, "args": {"step": plan.step}}
        yield {"ph": "e", "ts": self._us(max(began_s, step.planned_s)), **waits}

    def _turns(self, steps: list[Step]) -> Iterator[TraceEvent]:
        """Turns that planned steps. A turn's end is in the next plan's record."""
        for step, later in pairwise(steps):
            began_s, ended_s = step.plan.turn_began_s, later.plan.last_turn_ended_s
            if step.plan.turn_began_s == later.plan.turn_began_s or not began_s <= step.planned_s <= ended_s:
                continue  # one of several plans of a turn, or not the last turn before the later plan
            ended_s = min(ended_s, later.plan.turn_began_s)
            if step.ended_s is not None:  # after it, the end may be that of a later turn, which planned nothing
                ended_s = min(ended_s, max(step.planned_s, step.ended_s))
            args = {"step": step.plan.step, "planned after ms": round(1e3 * (step.planned_s - began_s), 3)}
            yield self._slice(self._backend, _LOOP, "turn", began_s, ended_s, args)

    def _requests(self) -> Iterator[TraceEvent]:
        """One asynchronous slice for each request, on its frontend's track."""
        left_s: dict[tuple[int, int], tuple[float, str]] = {}
        died_s = {event.frontend: time_s for time_s, event in self._life.events if isinstance(event, FrontendDied)}
        for time_s, event in self._life.events:
            match event:
                case Ended(frontend, request_id, finish, code):
                    left_s[frontend, request_id] = time_s, _describe_end(finish, code)
                case Cancelled(frontend, request_id) | Left(frontend, request_id, _, _):
                    left_s.setdefault((frontend, request_id), (time_s, "cancelled"))
        for time_s, event in self._life.events:
            if not isinstance(event, Arrived):
                continue
            request = event.frontend, event.request_id
            end_s, end = left_s.get(request, (died_s.get(event.frontend, 0.0), "open"))
            common = {
                "cat": "request",
                "id2": {"local": f"{event.frontend}/{event.request_id}"},
                "name": f"requests of frontend {event.frontend}",
                "pid": self._frontends,
                "tid": event.frontend,
            }
            args = {
                "request": event.request_id,
                "prompt tokens": event.num_prompt_tokens,
                "max tokens": event.max_tokens,
                "end": end,
            }
            yield {"ph": "b", "ts": self._us(time_s), **common, "args": args}
            if end_s:
                yield {"ph": "e", "ts": self._us(max(end_s, time_s)), **common}

    def _happenings(self) -> Iterator[TraceEvent]:
        for time_s, event in self._life.events:
            process, track, text = self._backend, _LOOP, ""
            match event:
                case Preempted(sequence):
                    process, track, text = self._sequences, sequence + 1, "preempted"
                case Joined(frontend, request_id, sequence) if sequence >= 0:
                    process, track, text = self._sequences, sequence + 1, f"request {frontend}/{request_id} joins"
                case Cancelled(frontend, request_id):
                    process, track, text = self._frontends, frontend, f"request {request_id} is cancelled"
                case FrontendDied(frontend):
                    process, track, text = self._frontends, frontend, "the frontend has died"
                case StepFailed(step, error):
                    track, text = _DEVICE, f"step {step} failed: {error}"
            if text:
                yield {"ph": "i", "s": "t", "name": text, "ts": self._us(time_s), "pid": process, "tid": track}

    def _sequence(self, sequence: int, rows: list[tuple[Step, Row]]) -> Iterator[TraceEvent]:
        track = sequence + 1
        starts = [
            (time_s, event)
            for time_s, event in self._life.events
            if isinstance(event, Started) and event.sequence == sequence
        ]
        requests = starts[0][1].requests if starts else ()
        names = ", ".join(str(request_id) for _, request_id in requests[:3])
        yield self._track_name(self._sequences, track, f"sequence {sequence}" + (f": request {names}" if names else ""))
        if requests and requests[0] in self._arrived_s:
            time_s, event = starts[0]
            args = {"cached tokens": event.num_cached, "restored pages": event.num_restored_pages}
            yield self._slice(self._sequences, track, "wait", self._arrived_s[requests[0]], time_s, args)
        run: list[tuple[Step, Row]] = []
        for step, row in [*rows, (None, None)]:
            is_decode = row is not None and row.length == 1
            if run and not (is_decode and step is not None and step.plan.step == run[-1][0].plan.step + 1):
                yield self._decodes(track, run)
                run = []
            if step is None or row is None:
                continue
            if is_decode:
                run.append((step, row))
            elif step.ended_s is not None:
                args = {"tokens": row.length, "computed after it": row.end, "step": step.plan.step}
                began_s = step.ended_s - step.step_s
                yield self._slice(self._sequences, track, "prefill", began_s, step.ended_s, args)

    def _decodes(self, track: int, run: list[tuple[Step, Row]]) -> TraceEvent:
        """One slice for consecutive steps of one token each."""
        (first, _), (last, row) = run[0], run[-1]
        began_s, ended_s = (first.ended_s or 0.0) - first.step_s, last.ended_s or 0.0
        args = {"tokens": len(run), "computed after it": row.end, "steps": f"{first.plan.step} to {last.plan.step}"}
        return self._slice(self._sequences, track, "decode", began_s, ended_s, args)


def _describe_end(finish: int, code: int) -> str:
    name = Finish(finish).name.lower() if finish in set(Finish) else str(finish)
    if code < 0:
        return name
    return f"{name}: {FailureCode(code).name.lower() if code in set(FailureCode) else code}"
