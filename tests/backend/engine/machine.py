"""Common rules of an engine's state machines: cancellations, deaths, steps and turns in any order."""

from __future__ import annotations

from typing import Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.shm.link.events import FrontendDeath
from tests.backend.harness import Bench, Received

Expected = TypeVar("Expected")

_MAX_LAST_TURNS = 5000


class EngineRules(RuleBasedStateMachine, Generic[Expected]):
    """A subclass makes `bench` in a rule of its own, submits requests and passes what they must receive to `expect`."""

    bench: Bench

    def __init__(self) -> None:
        super().__init__()
        self.frontend = 1
        self.next_id = 0
        self._expected: dict[tuple[int, int], Expected] = {}

    def expect(self, expected: Expected) -> None:
        """Note the result of the request that has just been submitted as `next_id` of `frontend`."""
        self._expected[self.frontend, self.next_id] = expected
        self.next_id += 1

    def check(self, received: Received, expected: Expected) -> None:
        """Check the result of a request that was neither cancelled nor lost its frontend."""
        raise NotImplementedError

    @precondition(lambda self: self._expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        frontend, request_id = data.draw(st.sampled_from(sorted(self._expected)))
        self.bench.cancel(request_id, frontend)
        del self._expected[frontend, request_id]

    @rule()
    def frontend_dies(self) -> None:
        self.bench.link.arrivals.append(FrontendDeath(self.frontend))
        self._expected = {key: expected for key, expected in self._expected.items() if key[0] != self.frontend}
        self.frontend += 1

    @rule()
    def step(self) -> None:
        self.bench.executor.run_one()

    @rule()
    def turn(self) -> None:
        self.bench.engine.turn()

    @invariant()
    def everything_is_owned_once(self) -> None:
        self.bench.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):  # it failed before its start
            return
        for _ in range(_MAX_LAST_TURNS):
            if self.bench.is_idle:
                break
            self.step()
            self.turn()
            self.bench.engine.check_integrity()
        assert self.bench.is_idle
        for (frontend, request_id), expected in self._expected.items():
            self.check(self.bench.received(request_id, frontend), expected)
        assert self.bench.pool.num_held == 0
        self.bench.close()
