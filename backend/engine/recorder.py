"""Writes the engine's decisions into a ring, for `penstock record` and for analysis after a crash.

The loop calls it for every step, so plans and results are packed directly. Events of requests and sequences are slower
(`events`). Without permission to record tokens, no token leaves this module.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec

from penstock.backend.engine.steps.launched_step import StepResult
from penstock.backend.forward_pass import StepBatch
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.shm.link.events import Cancellation, FrontendDeath, LinkEvent, Submission
from penstock.shm.memory.ring import RingWriter
from penstock.shm.messages import Failure, Finish, Generate, Pool, PromptHeader, TextHeader, encode
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
    pack_event,
)
from penstock.shm.recording.prompts import pack_prompt
from penstock.shm.recording.records import Kind, padding
from penstock.shm.recording.steps import (
    FAILED,
    HAS_DECODES,
    IS_KEY,
    MAX_ROWS,
    OMITS_ROWS,
    PLAN_HEAD,
    RESULT_HEAD,
    pack_chunks,
    pack_column,
    pack_key,
    pack_tokens,
)

_PLANS_PER_KEY_PLAN = 64
"""Every 64th plan records its rows and their sequences, so that a reader can begin there."""
_PRINT_BYTES = 8
"""Bytes of a page's hash that are recorded."""
_MAX_PRINTS = 4096
_MAX_REQUESTS = 1024
"""Listeners of a sequence that are named when it starts, at most."""
_PLAN = int(Kind.PLAN)  # an enum takes longer to pack than all other fields together
_RESULT = int(Kind.RESULT)
_PLAN_BYTES = PLAN_HEAD.size
_pack_plan = PLAN_HEAD.pack


class Recorder:
    """Used by the main thread only."""

    def __init__(
        self,
        append: Callable[[bytes], None],
        *,
        with_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """append takes each record, such as `RingWriter.append`."""
        self._append = append
        self._with_tokens = with_tokens
        self._clock = clock
        # The turn
        self.turn_began_s = 0.0
        """Set by the loop."""
        self._turn_ended_s = 0.0
        self._gauges = (0, 0, 0, 0)
        self._result: StepResult | None = None
        """The last result, if it is not written yet: the next plan's record has a place for it."""
        # Steps
        self._num_steps = 0
        self._num_results = 0
        self._num_decodes = -1
        """Decoding rows of the last plan; -1 if the next plan may decode others, even if they are as many."""
        self._key_step = 0
        """The step whose plan is the next key plan."""
        self._planned: deque[Plan] = deque()
        """Plans whose result has not come."""

    @classmethod
    def begin(cls, ring: RingWriter, started: BackendStarted) -> Self:
        """A recorder whose first record says which backend writes."""
        recorder = cls(ring.append, with_tokens=started.has_tokens)
        ring.write_note(pack_event(started, recorder._clock()))
        recorder._note(started)
        return recorder

    def end_turn(self, ended_s: float, num_running: int, num_waiting: int, pages_held: int, pages_idle: int) -> None:
        """The next plan reports these numbers."""
        self._turn_ended_s = ended_s
        self._gauges = num_running, num_waiting, pages_held, pages_idle
        if self._result is not None:
            self._write_result()

    # Steps

    def note_plan(self, plan: Plan, batch: StepBatch) -> None:
        """Call before the plan is launched: if it kills the process, the record is there."""
        step, num_decodes, num_rows = self._num_steps, plan.num_decodes, len(plan.sequences)
        flags, columns, num_results, ended_s, step_s = 0, b"", 0, 0.0, 0.0
        if num_decodes != self._num_decodes or num_rows != num_decodes or step >= self._key_step:
            flags, columns = self._columns(plan, num_decodes)
        if plan.drafts:
            self._key_step = step + 1  # readers cannot know how many drafts are accepted
        if (result := self._result) is not None:
            num_results, ended_s, step_s, self._result = self._num_results, result.ended_s, result.step_s, None
        running, waiting, held, idle = self._gauges
        record = _pack_plan(
            _PLAN_BYTES + len(columns),
            _PLAN,
            flags,
            self._clock(),
            step,
            self.turn_began_s,
            self._turn_ended_s,
            ended_s,
            step_s,
            num_results,
            num_decodes,
            num_rows - num_decodes,
            batch.num_tokens,
            running,
            waiting,
            held,
            idle,
        )
        self._append(record + columns if columns else record)
        self._num_steps = step + 1
        self._planned.append(plan)

    def note_result(self, result: StepResult) -> None:
        if self._result is not None:
            self._write_result()
        planned = self._planned.popleft()
        self._num_results += 1
        self._result = result
        if result.plan is not planned or result.error is not None or self._with_tokens:
            self._write_result(planned)

    def _write_result(self, planned: Plan | None = None) -> None:
        """Write the last result in a record of its own. planned is its plan if not all rows may have run."""
        result, self._result = self._result, None
        if result is None:
            return
        step, plan, flags, dropped = self._num_results - 1, result.plan, 0, b""
        num_dropped = 0 if planned is None else len(planned) - len(plan)
        if result.error is not None:
            flags = FAILED
            self._note(StepFailed(step, type(result.error).__name__))
        if num_dropped > MAX_ROWS:
            flags |= OMITS_ROWS
        elif num_dropped and planned is not None:
            ran = set(plan.slots)
            dropped = pack_column([slot for slot in planned.slots if slot not in ran])
            dropped += padding(len(dropped))
        num_bytes = RESULT_HEAD.size + len(dropped)
        times_s = result.ended_s, result.step_s
        counts = len(plan), plan.num_tokens, num_dropped, 0
        self._append(RESULT_HEAD.pack(num_bytes, _RESULT, flags, self._clock(), step, *times_s, *counts) + dropped)
        if self._with_tokens and result.token_ids:
            sampled = [
                (plan.slots[index], token_id)
                for index, last in zip(plan.logit_rows, result.token_ids, strict=True)
                for token_id in (*result.accepted.get(index, ()), last)
            ]
            self._append(pack_tokens(step, self._clock(), *zip(*sampled, strict=True)))

    def _columns(self, plan: Plan, num_decodes: int) -> tuple[int, bytes]:
        """The flags and columns of a plan whose rows differ from those of the plan before.

        The same number of decoding rows means the same rows, unless a sequence has started, left, was preempted or has
        computed the last of its given tokens since the plan before.
        """
        for sequence in plan.slot_init_sequences:
            self._note_start(plan, sequence)
        if len(plan) > MAX_ROWS:
            self._num_decodes = -1
            return OMITS_ROWS, b""
        flags, columns = 0, b""
        is_key = self._num_steps >= self._key_step
        if num_decodes != self._num_decodes or is_key:
            flags, columns = HAS_DECODES, pack_column(plan.slots[:num_decodes])
        columns += pack_chunks(plan.slots[num_decodes:], plan.lengths[num_decodes:], plan.ends[num_decodes:])
        if is_key:
            self._key_step = self._num_steps + _PLANS_PER_KEY_PLAN
            flags |= IS_KEY
            columns += pack_key(len(columns), plan.ends, [sequence.order for sequence in plan.sequences])
        self._num_decodes = num_decodes if len(plan.logit_rows) == num_decodes else -1
        return flags, columns + padding(len(columns))

    def _note_start(self, plan: Plan, sequence: Sequence) -> None:
        requests = [(subscriber.frontend, subscriber.request_id) for subscriber in sequence.subscribers]
        self._note(
            Started(
                sequence.order,
                -1 if sequence.slot is None else sequence.slot,
                len(sequence.tokens),
                sequence.kv.num_cached,
                len(plan.page_restores.get(sequence, ())),
                tuple(requests[:_MAX_REQUESTS]),
                b"".join([page_hash[:_PRINT_BYTES] for page_hash in sequence.kv.page_hashes[:_MAX_PRINTS]]),
            )
        )

    # Requests

    def note_event(self, event: LinkEvent) -> None:
        """Record a frontend's event before the engine acts on it."""
        match event:
            case Submission():
                self._note_arrival(event)
            case Cancellation(frontend, request_id):
                self._note(Cancelled(frontend, request_id))
            case FrontendDeath(frontend):
                self._note(FrontendDied(frontend))

    def _note_arrival(self, submission: Submission[PromptHeader]) -> None:
        message = submission.message
        max_tokens, is_greedy, is_constrained, pooled = 1, False, False, ""
        match message:
            case TextHeader():
                max_tokens, is_greedy = message.max_tokens, message.sampling.temperature == 0.0
                is_constrained = message.constraints is not None
            case Pool():
                pooled = message.pooled.kind
        self._note(
            Arrived(
                submission.frontend,
                message.request_id,
                message.num_prompt_tokens,
                len(submission.tokens) // 4,
                max_tokens,
                message.tenant.hex(),
                message.weight,
                message.priority,
                message.timeout_ms,
                message.admitted_ns > 0,
                message.may_share,
                is_greedy,
                is_constrained,
                pooled,
                message.adapter,
            )
        )
        has_pictures = isinstance(message, TextHeader) and bool(message.pictures)
        if self._with_tokens and submission.embeddings is None and not has_pictures:
            if isinstance(message, Generate):
                message = msgspec.structs.replace(message, output=None, linger=None)
            # The tokens may be in memory that the frontend reuses, so they are copied beside the message.
            encoded = encode(msgspec.structs.replace(message, tokens=bytes(4)))
            for record in pack_prompt(
                submission.frontend, message.request_id, encoded, submission.tokens, self._clock()
            ):
                self._append(record)

    def note_join(self, sequence: Sequence, subscriber: Subscriber) -> None:
        self._note(Joined(subscriber.frontend, subscriber.request_id, sequence.order))

    def note_leave(self, sequence: Sequence, subscriber: Subscriber) -> None:
        self._num_decodes = -1
        self._note(Left(subscriber.frontend, subscriber.request_id, sequence.order, len(sequence.tokens)))

    def note_end(self, frontend: int, request_id: int, finish: Finish, failure: Failure | None) -> None:
        self._note(Ended(frontend, request_id, int(finish), -1 if failure is None else failure.code))

    def note_preemption(self, sequence: Sequence) -> None:
        self._num_decodes = -1
        self._note(Preempted(sequence.order))

    def _note(self, event: Event) -> None:
        self._append(pack_event(event, self._clock()))
