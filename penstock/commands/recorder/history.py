"""Puts the records of a file together again: which sequence had which tokens in which step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.shm.messages import PROTOCOL_VERSION
from penstock.shm.recording.events import BackendStarted, Event, Started, unpack_event
from penstock.shm.recording.file import Recording
from penstock.shm.recording.prompts import PromptAssembler, RecordedPrompt
from penstock.shm.recording.records import Kind, Record
from penstock.shm.recording.steps import PlanRecord, Row, RowTracker, unpack_plan, unpack_result, unpack_tokens


@dataclass(slots=True)
class Step:
    plan: PlanRecord
    planned_s: float
    rows: list[Row] | None
    """None if the recording begins too late to know them, or omits them."""
    ended_s: float | None = None
    """None for a step without a result."""
    step_s: float = 0.0
    dropped_slots: frozenset[int] = frozenset()
    is_failed: bool = False
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Slot → the sampled tokens, if tokens are recorded."""


@dataclass(slots=True)
class Life:
    """One backend, from its start to its end, as far as it was recorded."""

    started: BackendStarted | None = None
    began_s: float = 0.0
    """Time of the first record."""
    steps: dict[int, Step] = field(default_factory=dict)
    """Steps by number."""
    events: list[tuple[float, Event]] = field(default_factory=list)
    prompts: dict[tuple[int, int], RecordedPrompt] = field(default_factory=dict)
    """(frontend, request id) → the request with its tokens, if tokens are recorded and of this protocol."""


class _Reader:
    def __init__(self) -> None:
        self.lives: list[Life] = []
        self._begin_life(None, 0.0)

    def _begin_life(self, started: BackendStarted | None, time_s: float) -> None:
        self.life = Life(started, time_s)
        self.lives.append(self.life)
        self._prompts = PromptAssembler()
        self.rows = RowTracker()

    def read(self, record: Record) -> None:
        """Raises ValueError."""
        life = self.life
        life.began_s = life.began_s or record.time_s
        match record.kind:
            case Kind.EVENT:
                self._read_event(record.time_s, unpack_event(record.body))
            case Kind.PLAN:
                self._read_plan(record.time_s, unpack_plan(record.flags, record.body))
            case Kind.RESULT:
                result = unpack_result(record.flags, record.body)
                if (step := life.steps.get(result.step)) is not None:
                    step.ended_s, step.step_s = result.ended_s or record.time_s, result.step_s
                    step.dropped_slots, step.is_failed = frozenset(result.dropped_slots), result.is_failed
            case Kind.TOKENS:
                tokens = unpack_tokens(record.body)
                if (step := life.steps.get(tokens.step)) is not None:
                    for slot, token_id in zip(tokens.slots, tokens.token_ids, strict=True):
                        step.token_ids.setdefault(slot, []).append(token_id)
            case Kind.PROMPT:
                is_readable = life.started is not None and life.started.protocol_version == PROTOCOL_VERSION
                if is_readable and (complete := self._prompts.add(record.body)) is not None:
                    frontend, request_id, prompt = complete
                    life.prompts[frontend, request_id] = prompt

    def _read_event(self, time_s: float, event: Event) -> None:
        if isinstance(event, BackendStarted):
            if self.life.started is None and not self.life.steps:
                self.life.started, self.life.began_s = event, time_s
            elif event != self.life.started:  # its note comes first, and may be followed by its event
                self._begin_life(event, time_s)
            return
        if isinstance(event, Started):
            self.rows.note_start(event.slot, event.sequence)
        self.life.events.append((time_s, event))

    def _read_plan(self, time_s: float, plan: PlanRecord) -> None:
        if plan.num_results and (earlier := self.life.steps.get(plan.num_results - 1)) is not None:
            earlier.ended_s, earlier.step_s = plan.result_ended_s or time_s, plan.result_step_s
        self.life.steps[plan.step] = Step(plan, time_s, self.rows.rows(plan))


def read_history(recording: Recording) -> list[Life]:
    """The lives of a recording, oldest first. An inconsistency ends the recording, and is its `problem`."""
    reader = _Reader()
    gaps = frozenset(recording.gaps)
    try:
        for index, record in enumerate(recording.records):
            if index in gaps:
                reader.rows.forget()
            reader.read(record)
    except ValueError as error:
        recording.problem = str(error)
    return [life for life in reader.lives if life.steps or life.events or life.started is not None]


def sequences_of(steps: Iterable[Step]) -> dict[int, list[tuple[Step, Row]]]:
    """Sequence → its rows that ran, in order."""
    found: dict[int, list[tuple[Step, Row]]] = {}
    for step in steps:
        for row in step.rows or ():
            if row.sequence >= 0 and step.ended_s is not None and row.slot not in step.dropped_slots:
                found.setdefault(row.sequence, []).append((step, row))
    return found
