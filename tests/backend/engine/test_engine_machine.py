"""Any order of submissions, cancellations, deaths, steps and turns leaves each stream exact."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backend.passes.fake import FakePass, StatefulFakePass, WindowedFakePass
from penstock.shm.link.events import FrontendDeath
from tests.backend.harness import Bench, expected_tokens


class EngineMachine(RuleBasedStateMachine):
    """Any order of submissions, cancels, deaths, steps and turns, with few pages: every survivor's stream is exact."""

    @initialize(
        num_pages=st.integers(4, 20),
        page_size=st.integers(1, 5),
        max_running=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        capacity=st.integers(0, 3),
        kind=st.sampled_from((FakePass, StatefulFakePass, WindowedFakePass)),
    )
    def start(
        self,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_batch_tokens: int,
        capacity: int,
        kind: type[FakePass],
    ) -> None:
        self.context = num_pages * page_size
        self.bench = Bench(
            num_pages=num_pages,
            page_size=page_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
            max_context=self.context,
            forward_pass=kind(97, max_running),
        )
        self.next_id = 0
        self.frontend = 1
        self.expected: dict[tuple[int, int], list[int]] = {}
        self.num_scored: dict[tuple[int, int], int] = {}

    @rule(data=st.data(), max_tokens=st.integers(1, 12), stop=st.integers(0, 96), is_scored=st.booleans())
    def submit(self, data: st.DataObject, max_tokens: int, stop: int, is_scored: bool) -> None:
        prompt = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=min(14, self.context)))
        self.bench.submit(
            prompt,
            max_tokens,
            frontend=self.frontend,
            request_id=self.next_id,
            stop_ids=(stop,),
            num_prompt_logprobs=0 if is_scored else -1,
        )
        self.num_scored[self.frontend, self.next_id] = (
            len(prompt) - 1 if is_scored and len(prompt) < self.context else 0
        )
        count = min(max_tokens, self.context - len(prompt))
        window_tokens = self.bench.forward_pass.spec.window_tokens
        self.expected[self.frontend, self.next_id] = expected_tokens(prompt, count, 97, (stop,), window_tokens)
        self.next_id += 1

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        frontend, request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.bench.cancel(request_id, frontend)
        del self.expected[frontend, request_id]

    @rule()
    def frontend_dies(self) -> None:
        self.bench.link.arrivals.append(FrontendDeath(self.frontend))
        self.expected = {key: tokens for key, tokens in self.expected.items() if key[0] != self.frontend}
        self.frontend += 1

    @rule()
    def step(self) -> None:
        self.bench.executor.run_one()

    @rule()
    def turn(self) -> None:
        self.bench.engine.turn()

    @invariant()
    def everything_is_owned_once(self) -> None:
        if hasattr(self, "bench"):
            self.bench.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run_dry()
        for (frontend, request_id), tokens in self.expected.items():
            received = self.bench.received(request_id, frontend)
            assert received.token_ids == tokens
            scored = [entry.event for entry in received.prompt_logprobs]
            assert scored == list(range(1, 1 + self.num_scored[frontend, request_id]))
        assert self.bench.pool.num_held == 0
        self.bench.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
