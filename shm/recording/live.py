"""Follows a running engine through its flight recorder: steps as they end, and what is open now.

The reader costs the engine nothing: it copies what the loop has written anyway. Start with `LiveEngine.poll`.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.shm.memory.ring import RingReader, Stretch
from penstock.shm.recording.events import (
    Arrived,
    BackendStarted,
    Cancelled,
    Ended,
    Event,
    FrontendDied,
    Joined,
    Left,
    Preempted,
    Started,
    StepFailed,
    unpack_event,
)
from penstock.shm.recording.live_state import (
    NOT_FOUND,
    Changes,
    EngineEvent,
    EventKind,
    LiveRequest,
    LiveSequence,
    StepColumn,
    Wait,
)
from penstock.shm.recording.records import Kind, Record, unpack
from penstock.shm.recording.steps import IS_KEY, PlanRecord, Row, RowTracker, unpack_plan, unpack_result

_MAX_PENDING = 64
"""Steps without a result, of which a running engine has a few."""


class LiveEngine:
    """Reads one ring. Used by one thread at a time."""

    def __init__(self, ring: RingReader) -> None:
        """The ring stays the caller's."""
        self._ring = ring
        self._position = 0
        self._num_requests = 0
        self.started: BackendStarted | None = None
        """The backend that writes; None until its note has been read."""
        self.last: StepColumn | None = None
        self._changes = Changes()
        self._forget()

    def _forget(self) -> None:
        self.requests: dict[tuple[int, int], LiveRequest] = {}
        """Open requests by frontend and request id, in the order of their arrival."""
        self.sequences: dict[int, LiveSequence] = {}
        """Sequences that run or are preempted, by number."""
        self._rows = RowTracker()
        self._pending: dict[int, tuple[PlanRecord, int, int]] = {}
        """Step → its plan, its restored rows and its coalesced listeners."""
        self._last_end_s = 0.0
        self._busy_since_s = 0.0
        """When the first request came after a time without requests."""
        self._num_shared = 0
        """Sequences that more than one request listens to."""

    def poll(self) -> Changes:
        """Read what was written since the last call, at first all that the ring holds. Raises ValueError for records
        that are damaged."""
        changes = self._changes = Changes()
        stretch = self._ring.read(self._position)
        if stretch.begin > self._position > 0:
            changes.has_gap = True
            self._forget()
        self._position = stretch.end
        self._read_note()
        for data in stretch.records:
            self._read(unpack(data))
        return changes

    def _read_note(self) -> None:
        if self.started is None and (note := self._ring.read_note()):
            event = unpack_event(unpack(note).body)
            self.started = event if isinstance(event, BackendStarted) else None

    def _read(self, record: Record) -> None:
        match record.kind:
            case Kind.PLAN:
                self._read_plan(unpack_plan(record.flags, record.body), record.time_s)
            case Kind.RESULT:
                result = unpack_result(record.flags, record.body)
                ended_s, num_dropped = result.ended_s or record.time_s, len(result.dropped_slots)
                self._end_step(result.step, ended_s, result.step_s, num_dropped, is_failed=result.is_failed)
            case Kind.EVENT:
                event = unpack_event(record.body)
                if (shown := self._read_event(event, record.time_s)) is not None:
                    self._changes.events.append(shown)

    # Steps

    def _read_plan(self, plan: PlanRecord, time_s: float) -> None:
        if plan.num_results:
            self._end_step(plan.num_results - 1, plan.result_ended_s or time_s, plan.result_step_s)
        rows = self._rows.rows(plan)
        num_restored = num_listeners = 0
        for row in rows or ():
            sequence = self._sequence_of(row, plan)
            if sequence is None:
                continue
            sequence.num_computed = row.end
            if sequence.is_restored:
                sequence.is_restored = False
                num_restored += 1
            if self._num_shared:
                num_listeners += max(0, len(sequence.requests) - 1)
        self._pending[plan.step] = plan, num_restored, num_listeners
        if len(self._pending) > _MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def _sequence_of(self, row: Row, plan: PlanRecord) -> LiveSequence | None:
        """The row's sequence, which may have started before the first record."""
        sequence = self.sequences.get(row.sequence)
        if sequence is None and row.sequence >= 0 and plan.sequences is not None:
            sequence = LiveSequence(row.sequence, row.slot, plan.turn_began_s)
            self.sequences[row.sequence] = sequence
        return sequence

    def _end_step(
        self,
        step: int,
        ended_s: float,
        step_s: float,
        num_dropped: int = 0,
        *,
        is_failed: bool = False,
    ) -> None:
        while self._pending and (earliest := next(iter(self._pending))) < step:
            del self._pending[earliest]  # its result is missing
        if (pending := self._pending.pop(step, None)) is None:
            return
        plan, num_restored, num_listeners = pending
        could_begin_s = max(self._last_end_s, self._busy_since_s)
        waited_s = max(0.0, ended_s - step_s - could_begin_s) if self._last_end_s else 0.0
        self._last_end_s = ended_s
        self.last = StepColumn(
            step,
            ended_s,
            step_s,
            waited_s,
            plan.num_decodes,
            max(0, plan.num_chunks - num_restored),
            num_restored,
            num_listeners,
            plan.num_tokens,
            num_dropped,
            plan.num_running,
            plan.num_waiting,
            plan.pages_held,
            plan.pages_idle,
            is_failed,
        )
        self._changes.steps.append(self.last)

    # Requests

    def _read_event(self, event: Event, time_s: float) -> EngineEvent | None:
        match event:
            case BackendStarted():
                self._forget()
                self.started = event
                return EngineEvent(time_s, EventKind.RESTARTED, NOT_FOUND, NOT_FOUND, event.pid)
            case Arrived():
                return self._arrive(event, time_s)
            case Joined(frontend, request_id, number):
                return self._join((frontend, request_id), number, time_s)
            case Started():
                return self._start(event, time_s)
            case Preempted(number):
                if (sequence := self.sequences.get(number)) is not None:
                    sequence.is_running = False
                    sequence.num_preemptions += 1
                return EngineEvent(time_s, EventKind.PREEMPTED, self._first_key(number), number)
            case Cancelled(frontend, request_id):
                key, number = self._names((frontend, request_id))
                return EngineEvent(time_s, EventKind.CANCELLED, key, number)
            case Ended(frontend, request_id, finish, _):
                key, number = self._names((frontend, request_id))
                self._leave((frontend, request_id), number)
                return EngineEvent(time_s, EventKind.ENDED, key, number, finish)
            case Left(frontend, request_id, number, _):
                self._leave((frontend, request_id), number)
                return None
            case FrontendDied(frontend):
                for name in [name for name in self.requests if name[0] == frontend]:
                    self._leave(name, self._names(name)[1])
                return EngineEvent(time_s, EventKind.FRONTEND_LEFT, NOT_FOUND, NOT_FOUND, frontend)
            case StepFailed(step, _):
                return EngineEvent(time_s, EventKind.FAILED_STEP, NOT_FOUND, NOT_FOUND, step)

    def _arrive(self, event: Arrived, time_s: float) -> EngineEvent:
        self._num_requests += 1
        if not self.requests and not self.sequences:
            self._busy_since_s = time_s
        request = LiveRequest(
            self._num_requests,
            event.frontend,
            event.request_id,
            event.tenant,
            time_s,
            event.num_prompt_tokens,
            event.num_tokens,
            event.max_tokens,
            event.has_grammar,
            event.pooled,
            is_resumed=event.is_resumed,
        )
        self.requests[event.frontend, event.request_id] = request
        return EngineEvent(time_s, EventKind.ARRIVED, request.key, NOT_FOUND, event.num_tokens)

    def _join(self, name: tuple[int, int], number: int, time_s: float) -> EngineEvent:
        request, sequence = self.requests.get(name), self.sequences.get(number)
        if request is not None:
            request.is_coalesced = True
            if sequence is not None:
                self._listen(sequence, name, request)
        return EngineEvent(time_s, EventKind.JOINED, self._names(name)[0], number)

    def _start(self, event: Started, time_s: float) -> EngineEvent:
        self._rows.note_start(event.slot, event.sequence)
        sequence = self.sequences.get(event.sequence)
        goes_on = sequence is not None and not sequence.is_running
        if sequence is None:
            sequence = self.sequences[event.sequence] = LiveSequence(event.sequence, event.slot, time_s)
        sequence.slot, sequence.is_running = event.slot, True
        sequence.num_tokens, sequence.num_cached = event.num_tokens, event.num_cached
        sequence.num_computed = event.num_cached
        sequence.is_restored = goes_on or event.num_restored_pages > 0
        for name in event.requests:
            if (request := self.requests.get(name)) is not None:
                self._listen(sequence, name, request)
                goes_on = goes_on or request.is_resumed
        kind = EventKind.RESUMED if goes_on else EventKind.STARTED
        return EngineEvent(time_s, kind, self._first_key(event.sequence), event.sequence, event.num_cached)

    def _listen(self, sequence: LiveSequence, name: tuple[int, int], request: LiveRequest) -> None:
        if name not in sequence.requests:
            sequence.requests[name] = request
            request.sequence = sequence
            self._num_shared += len(sequence.requests) == 2

    def _leave(self, name: tuple[int, int], number: int) -> None:
        """Forget the request, and with its last request the sequence."""
        if (request := self.requests.pop(name, None)) is not None:
            self._changes.left.append(request)
        if (sequence := self.sequences.get(number)) is None:
            return
        if sequence.requests.pop(name, None) is not None:
            self._num_shared -= len(sequence.requests) == 1
        if not sequence.requests:
            del self.sequences[number]

    def _names(self, name: tuple[int, int]) -> tuple[int, int]:
        """The request's key, and its sequence's number."""
        if (request := self.requests.get(name)) is None:
            return NOT_FOUND, NOT_FOUND
        return request.key, NOT_FOUND if request.sequence is None else request.sequence.number

    def _first_key(self, number: int) -> int:
        sequence = self.sequences.get(number)
        return next((request.key for request in sequence.requests.values()), NOT_FOUND) if sequence else NOT_FOUND

    # The present

    def waiting(self) -> list[LiveRequest]:
        """Open requests that have no slot now, first those that came first."""
        return [
            request for request in self.requests.values() if request.sequence is None or not request.sequence.is_running
        ]

    def why_it_waits(self, request: LiveRequest) -> Wait:
        if request.sequence is not None:
            return Wait.PREEMPTED
        started, last = self.started, self.last
        if started is None or last is None:
            return Wait.TURN
        if last.num_running >= started.max_running:
            return Wait.SLOTS
        if started.page_size and started.num_pages - last.pages_held < request.num_tokens // started.page_size + 1:
            return Wait.PAGES
        return Wait.GRAMMAR if request.has_grammar else Wait.TURN


def read_last(ring: RingReader, seconds: float) -> Stretch:
    """Return at least the records of the given seconds before the last record, if there are that many.

    The first record is the note of the backend that wrote them; the next is a key plan.
    """
    stretch = ring.read()
    if not stretch.records:
        return stretch
    since_s = unpack(stretch.records[-1]).time_s - seconds
    first = 0
    for index, data in enumerate(stretch.records):
        record = unpack(data)
        if record.time_s >= since_s:
            break
        if record.kind == Kind.PLAN and record.flags & IS_KEY:
            first = index
    note = ring.read_note()
    return replace(stretch, records=[*([note] if note else []), *stretch.records[first:]])
