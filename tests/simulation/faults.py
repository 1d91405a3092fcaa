"""The engine's parts with planted errors: some part fails on certain requests, now and then.

Such a request may fail, and with it all subscribers of its sequence. No other request may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.delivery import Delivery
from penstock.backend.engine.intake import Intake
from penstock.backend.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.scheduler import Chunk
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.shm.link.events import Submission
    from penstock.shm.messages import EventLogprobs
    from tests.simulation.world import World

ENGINE_ERRORS = ("add", "note", "build", "deliver", "step")
"""Places at which the engine fails on a request: at intake, as its pages are indexed, rows built or tokens delivered.
"step" is a failure of the device in each step that includes it."""


class FaultyScheduler(Scheduler):
    """Also remembers what it did, for the judge."""

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world
        self.started: set[Sequence] = set()
        """Sequences that the last plan admitted."""
        self.bisected: set[tuple[Sequence, int]] = set()
        """(sequence, generation) of rows that run again after a failed step."""

    def plan(self) -> Plan:
        self.started = set()
        return super().plan()

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._world.break_down("add", [sequence])

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        self._world.break_down("note", [sequence])
        super().note_computed(sequence, num_tokens)

    def bisect(self, chunks: list[Chunk]) -> None:
        super().bisect(chunks)
        self.bisected |= {(sequence, sequence.generation) for sequence, _ in chunks}

    def _start(self, sequence: Sequence, *args: Any, **options: Any) -> None:
        super()._start(sequence, *args, **options)
        self.started.add(sequence)


class FaultyBuilder(BatchBuilder):
    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
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
        self, submission: Submission, matcher: LLMatcher | None, arrived_s: float, deadline_s: float | None
    ) -> None:
        try:
            super().assign_sequence(submission, matcher, arrived_s, deadline_s)
        finally:
            self._world.judge.note_submission(submission.frontend, submission.request_id, arrived_s)


class FaultyDelivery(Delivery):
    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world

    def deliver(self, sequence: Sequence, token_id: int, logprobs: EventLogprobs | None = None) -> None:
        self._world.break_down("deliver", [sequence])
        super().deliver(sequence, token_id, logprobs)

    def replay(self, sequence: Sequence, subscriber: Subscriber) -> None:
        self._world.break_down_request("deliver", subscriber)
        super().replay(sequence, subscriber)
