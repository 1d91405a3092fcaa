"""Random schedules of the operations of both ends, in one thread, compared with a simple model."""

from __future__ import annotations

import random
from array import array
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.memory.arena import ArenaFull
from penstock.shm.messages import NO_TOKEN, Cancel, Credit, Finish, StepOutputs
from tests.shm.link.harness import Backend, Event, Frontend, columns

TINY, LONG = [1, 2], list(range(4100))


@dataclass
class Expected:
    """The requests of one frontend, and the tokens that it must have received."""

    frontend: Frontend
    next_id: int = 0
    submitted: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    received: dict[int, list[int]] = field(default_factory=dict)
    unacknowledged: int = 0

    @property
    def tokens_received(self) -> int:
        return sum(len(tokens) for tokens in self.received.values())

    def return_credits(self) -> None:
        if self.unacknowledged:
            self.frontend.send(Credit(self.unacknowledged))
            self.unacknowledged = 0

    def take(self, outputs: list[StepOutputs]) -> None:
        self.unacknowledged += len(outputs)
        for request_id, token_id, finish in columns(outputs):
            assert request_id in self.submitted
            assert request_id not in self.finished
            self.frontend.session.free_slot(request_id)
            if token_id != NO_TOKEN:
                self.received.setdefault(request_id, []).append(token_id)
            if finish:
                self.finished.add(request_id)


class Schedule(Backend):
    """Every operation is legal at any time; the seed decides their order."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        super().__init__(socket_path, stall_limit_s=60.0)
        self.rng = random.Random(seed)
        self.alive: dict[int, Expected] = {}
        self.contexts: dict[int, AbstractContextManager[Frontend]] = {}
        self.dead: set[int] = set()
        self.open: dict[tuple[int, int], int] = {}  # (frontend, request) → tokens pushed so far
        self.pushed: dict[tuple[int, int], list[int]] = {}

    def run(self, num_operations: int) -> None:
        often = [self.step] * 8 + [self.submit] * 6 + [self.read] * 5 + [self.cancel] * 2
        for _ in range(num_operations):
            self.rng.choice([self.join, self.leave, *often])()
            if self.rng.random() < 0.5:
                self.turn()
        while self.alive:
            self.check(self.rng.choice(list(self.alive.values())))
            self.leave(probability=1.0)
        while len(self.dead) < len(self.contexts):
            self.turn(0.1)

    def turn(self, timeout_s: float = 0.0) -> list[Event]:
        events = super().turn(timeout_s)
        for event in events:
            assert event.frontend not in self.dead
            match event:
                case Submission(frontend, request_id, tokens):
                    assert tokens in (array("i", TINY).tobytes(), array("i", LONG).tobytes())
                    assert (frontend, request_id) not in self.open
                    self.open[frontend, request_id] = 0
                case Cancellation(frontend, request_id):
                    del self.open[frontend, request_id]
                case FrontendDeath(frontend):
                    self.dead.add(frontend)
                    for key in [key for key in self.open if key[0] == frontend]:
                        del self.open[key]
        return events

    def join(self) -> None:
        if len(self.alive) < 3:
            context = self.session()
            expected = Expected(context.__enter__())
            self.alive[expected.frontend.epoch] = expected
            self.contexts[expected.frontend.epoch] = context

    def leave(self, probability: float = 0.2) -> None:
        if self.alive and self.rng.random() < probability:
            epoch = self.rng.choice(list(self.alive))
            del self.alive[epoch]
            self.contexts[epoch].__exit__(None, None, None)

    def pick(self) -> Expected | None:
        return self.rng.choice(list(self.alive.values())) if self.alive else None

    def submit(self) -> None:
        if (expected := self.pick()) is not None:
            try:
                expected.frontend.submit(expected.next_id, self.rng.choice((TINY, TINY, LONG)))
            except ArenaFull:
                return
            expected.submitted.add(expected.next_id)
            expected.next_id += 1

    def cancel(self) -> None:
        if (expected := self.pick()) is not None:
            expected.frontend.send(Cancel(self.rng.randrange(expected.next_id + 3)))

    def step(self) -> None:
        """Push tokens for some open requests, ends for a few, and events for dead frontends, which are dropped."""
        for key in list(self.open):
            if self.rng.random() < 0.7:
                token = self.open[key]
                ends = self.rng.random() < 0.1
                self.link.push(*key, token, Finish.LENGTH if ends else Finish.NONE)
                self.pushed.setdefault(key, []).append(token)
                self.open[key] += 1
                if ends:
                    del self.open[key]
        for epoch in self.dead:
            self.link.push(epoch, 0, 1)
        self.link.flush()

    def read(self) -> None:
        if (expected := self.pick()) is not None:
            expected.take(expected.frontend.session.receive())
            if self.rng.random() < 0.8:
                expected.return_credits()

    def check(self, expected: Expected) -> None:
        """Everything pushed has arrived once and in order."""
        for _ in range(1000):
            for other in self.alive.values():
                other.take(other.frontend.session.receive())
                other.return_credits()
            all_sent = not self.link.balance().get("unsent") and not expected.frontend.session.holds_slots
            if all_sent and expected.tokens_received == self.tokens_pushed(expected):
                break
            self.turn(0.01)
        for request_id in expected.submitted:
            key = (expected.frontend.epoch, request_id)
            assert expected.received.get(request_id, []) == self.pushed.get(key, [])
        assert not expected.frontend.session.holds_slots

    def tokens_pushed(self, expected: Expected) -> int:
        return sum(len(tokens) for (epoch, _), tokens in self.pushed.items() if epoch == expected.frontend.epoch)


@pytest.mark.parametrize("seed", range(25))
def test_any_schedule_delivers_each_event_once_and_frees_everything(socket_path: Path, seed: int) -> None:
    schedule = Schedule(socket_path, seed)
    schedule.run(200)
    assert schedule.link.balance() == {}
    assert schedule.link.counters.faults == 0
    assert schedule.link.counters.blocked_sends == 0
    assert schedule.link.counters.stalled == 0
    schedule.close()
