"""The engine's parts with faults of ours in them: requests on which some part breaks down, now and then.

Such a request may fail, and with it whoever listens to its sequence. Nobody else may.
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

CURSES = ("add", "note", "build", "deliver", "step")
"""Where the engine breaks down on a request: as it is taken in, its pages named, its rows built, its tokens delivered;
or the device does, in each step that it is in."""


class FaultyScheduler(Scheduler):
    """Remembers, besides, what it did: the world judges plans by it."""

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world
        self.started: set[Sequence] = set()
        """By the last plan."""
        self.tried: set[tuple[Sequence, int]] = set()
        """(sequence, generation) of rows that run again after their step failed."""

    def plan(self) -> Plan:
        self.started = set()
        return super().plan()

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._world.strike("add", [sequence])

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        self._world.strike("note", [sequence])
        super().note_computed(sequence, num_tokens)

    def bisect(self, chunks: list[Chunk]) -> None:
        super().bisect(chunks)
        self.tried |= {(sequence, sequence.generation) for sequence, _ in chunks}

    def _start(self, sequence: Sequence, *args: Any, **options: Any) -> None:
        super()._start(sequence, *args, **options)
        self.started.add(sequence)


class FaultyBuilder(BatchBuilder):
    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._world = world

    def build(self, plan: Plan) -> StepBatch:
        batch = super().build(plan)
        self._world.strike("build", plan.sequences)
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
        self._world.strike("deliver", [sequence])
        super().deliver(sequence, token_id, logprobs)

    def replay(self, sequence: Sequence, subscriber: Subscriber) -> None:
        self._world.strike_request("deliver", subscriber)
        super().replay(sequence, subscriber)
