"""The engine's parts with planted errors: some part fails on certain requests, now and then.

Such a request may fail, and with it all subscribers of its sequence. No other request may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.intake import Intake
from penstock.backend.engine.steps.batch_builder import BatchBuilder
from penstock.backend.scheduling.admission import Admission
from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Chunk, Plan
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.backend.structured_output.compile_grammar import CompiledGrammar
    from penstock.shm.link.events import Submission
    from penstock.shm.messages import EventLogprobs, Generate, Pool, Started
    from tests.simulation.world import World

ENGINE_ERRORS = ("add", "note", "build", "deliver", "step")
"""Places at which the engine fails on a request: at intake, as its pages are indexed, rows built or tokens delivered.
"step" is a failure of the device in each step that includes it."""


class FaultyScheduler(Scheduler):
    """Also remembers what it did, for the judge."""

    def __init__(self, world: World, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world = world
        self.started: set[Sequence] = set()
        """Sequences that the last plan admitted."""
        self.bisected: set[tuple[Sequence, int]] = set()
        """(sequence, generation) of rows that run again after a failed step."""
        self._was_passed = False
        """Whether the sequence that is about to start has been passed by others."""
        self._passes: list[Sequence] = []
        """Sequences that it passes."""
        self._running.start = self._start_judged  # type: ignore[method-assign]
        self._admission._start_if_it_fits = self._start_if_it_fits  # type: ignore[method-assign]

    def plan(self) -> Plan:
        self.started = set()
        return super().plan()

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._world.judge.note_scheduled(sequence)
        self._world.break_down("add", [sequence])

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        self._world.break_down("note", [sequence])
        super().note_computed(sequence, num_tokens)

    def bisect(self, chunks: list[Chunk]) -> None:
        super().bisect(chunks)
        self.bisected |= {(sequence, sequence.generation) for sequence, _ in chunks}

    def _start_if_it_fits(self, sequence: Sequence, *args: Any, **options: Any) -> int:
        passed = list(self._waiting._passed)
        self._was_passed = sequence in passed
        self._passes = passed[: passed.index(sequence)] if self._was_passed else passed
        return Admission._start_if_it_fits(self._admission, sequence, *args, **options)

    def _start_judged(self, sequence: Sequence, *args: Any, **options: Any) -> None:
        num_available = self._pool.num_available
        RunningSequences.start(self._running, sequence, *args, **options)
        num_pages = num_available - self._pool.num_available
        self._world.judge.note_admission(sequence, num_pages, self._was_passed, self._passes)
        self.started.add(sequence)


class FaultyBuilder(BatchBuilder):
    def __init__(self, world: World, max_pages: int, *, has_adapters: bool) -> None:
        super().__init__(world.setup.max_running, max_pages, has_adapters=has_adapters)
        self._world = world

    def build(self, plan: Plan) -> StepBatch:
        batch = super().build(plan)
        self._world.break_down("build", plan.sequences)
        return batch


class FaultyIntake(Intake):
    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world

    def assign_sequence(
        self, submission: Submission[Generate], grammar: CompiledGrammar | None, arrived_s: float
    ) -> None:
        try:
            super().assign_sequence(submission, grammar, arrived_s)
        finally:
            self._world.judge.note_submission(submission.frontend, submission.request_id, arrived_s)

    def pool(self, submission: Submission[Pool], arrived_s: float) -> None:
        try:
            super().pool(submission, arrived_s)
        finally:
            self._world.judge.note_submission(submission.frontend, submission.request_id, arrived_s)


class FaultyDelivery(Delivery):
    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world

    def deliver(self, sequence: Sequence, token_id: int, logprobs: EventLogprobs | None = None) -> None:
        self._world.break_down("deliver", [sequence])
        super().deliver(sequence, token_id, logprobs)

    def deliver_scored(self, sequence: Sequence, entries: list[EventLogprobs]) -> None:
        self._world.break_down("deliver", [sequence])
        super().deliver_scored(sequence, entries)

    def start(self, sequence: Sequence, subscriber: Subscriber) -> Started:
        if subscriber.pooled is not None:
            self._world.break_down_request("deliver", subscriber)
        return super().start(sequence, subscriber)

    def replay(self, sequence: Sequence, subscriber: Subscriber) -> None:
        self._world.break_down_request("deliver", subscriber)
        super().replay(sequence, subscriber)
