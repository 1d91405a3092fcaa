"""Any order of submissions, cancellations, deaths, steps and turns leaves each stream exact."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from penstock.backend.passes.fake import FakePass
from tests.backend.engine.machine import EngineRules
from tests.backend.harness import Bench, Received, expected_tokens
from tests.fake_passes import GroupedFakePass, StatefulFakePass, WindowedFakePass


class EngineMachine(EngineRules[tuple[list[int], int]]):
    """Few pages. A request expects tokens and a number of prompt positions with log probabilities."""

    @initialize(
        num_pages=st.integers(4, 20),
        page_size=st.integers(1, 5),
        max_running=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        capacity=st.integers(0, 3),
        num_checkpoints=st.integers(0, 4),
        kind=st.sampled_from((FakePass, StatefulFakePass, WindowedFakePass, GroupedFakePass)),
    )
    def start(
        self,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_batch_tokens: int,
        capacity: int,
        num_checkpoints: int,
        kind: type[FakePass],
    ) -> None:
        self.context = num_pages * page_size
        forward_pass = kind(97, max_running)
        self.bench = Bench(
            num_pages=num_pages * len(forward_pass.spec.kv_windows),
            page_size=page_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
            num_checkpoints=num_checkpoints,
            max_context=self.context,
            forward_pass=forward_pass,
        )

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
        num_scored = len(prompt) - 1 if is_scored and len(prompt) < self.context else 0
        count = min(max_tokens, self.context - len(prompt))
        kv_windows = self.bench.forward_pass.spec.kv_windows
        self.expect((expected_tokens(prompt, count, 97, (stop,), kv_windows), num_scored))

    def check(self, received: Received, expected: tuple[list[int], int]) -> None:
        tokens, num_scored = expected
        assert received.token_ids == tokens
        assert [entry.event for entry in received.prompt_logprobs] == list(range(1, 1 + num_scored))


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40)
