"""Grammars and token lists of requests through the whole engine, with the demo model's tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.backend.forward_pass import PendingOutput, StepBatch, TokenMasks
from penstock.backend.passes.fake import FakePass
from penstock.backend.structured_output.constraints import ConstraintFailed, SequenceConstraints
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.shm.messages import Constraints, FailureCode, Finish, Grammar, Sampling
from tests.backend.buffers.embedded_prompts import random_rows, submit_embedded
from tests.backend.engine.test_failed_steps import PassingFault
from tests.backend.harness import Bench, expected_tokens
from tests.backend.structured_output.constrained import (
    DIGITS,
    EOS,
    PROMPT,
    VOCAB_SIZE,
    ask,
    compile_all,
    new_bench,
    text,
    tokens_of,
)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.5, seed=3)])
def test_grammar_constrains_only_its_own_request(compiler: GrammarCache, sampling: Sampling) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, sampling=sampling)
    bench.submit(PROMPT, 6, request_id=1)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 0).isdigit()
    assert 5 <= len(text(bench, 0)) <= 8
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 6, VOCAB_SIZE)


def test_constrained_tokens_do_not_depend_on_batch_preemption_or_chunks(compiler: GrammarCache) -> None:
    alone = new_bench(compiler)
    ask(alone, 0, sampling=Sampling(temperature=1.0, seed=9))
    compile_all(alone)
    alone.run_dry()
    expected = alone.received(0).token_ids
    rng = random.Random(4)
    for capacity in (0, 1, 3):
        bench = new_bench(compiler, num_pages=9, max_batch_tokens=8, capacity=capacity)
        for request_id in range(6):
            ask(bench, request_id, sampling=Sampling(temperature=1.0, seed=9))
            bench.submit([rng.randrange(1, 90) for _ in range(7)], 14, request_id=100 + request_id)
        compile_all(bench)
        bench.run_dry()
        assert bench.scheduler.num_preemptions > 0
        assert all(bench.received(request_id).token_ids == expected for request_id in range(6))


@pytest.mark.parametrize("is_late", [False, True])
def test_failed_step_that_runs_again_does_not_advance_the_grammar(compiler: GrammarCache, is_late: bool) -> None:
    streams = []
    for steps in (set[int](), {5}, {3, 4}, {5, 9}):
        bench = new_bench(compiler, forward_pass=PassingFault(steps, is_late=is_late, vocab_size=VOCAB_SIZE))
        for request_id in range(3):
            ask(bench, request_id, sampling=Sampling(temperature=1.0, seed=request_id))
        compile_all(bench)
        bench.run_dry()
        assert all(text(bench, request_id).isdigit() for request_id in range(3))
        streams.append([bench.received(request_id).token_ids for request_id in range(3)])
    assert streams == streams[:1] * 4


class FaultOfNobody(FakePass):
    """Every period-th step of several rows fails after it has sampled."""

    def __init__(self, period: int, num_host_pages: int) -> None:
        super().__init__(VOCAB_SIZE, 8, num_host_pages * 4 * 8)
        self.period = period
        self.num_steps = 0

    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
        output = super().sample(logits, batch, masks)
        self.num_steps += batch.num_rows > 1
        if batch.num_rows > 1 and self.num_steps % self.period == 0:
            raise ArithmeticError("planted")
        return output


@pytest.mark.parametrize("capacity", [0, 1, 4])
@pytest.mark.parametrize("period", [1000, 5])
def test_grammar_and_embeddings_survive_preemption_restored_pages_and_failed_steps(
    compiler: GrammarCache, period: int, capacity: int
) -> None:
    drawn = Sampling(temperature=1.0, seed=9, num_logprobs=1)

    def ask_embedded(bench: Bench, request_id: int) -> None:
        rows = random_rows(9 + request_id, request_id)
        options = {"sampling": drawn, "constraints": Constraints(grammar=DIGITS), "stop_token_ids": (EOS,)}
        submit_embedded(bench, rows, request_id, 12, **options)  # type: ignore[arg-type]

    alone = []
    for request_id in range(4):
        bench = new_bench(compiler)
        ask_embedded(bench, request_id)
        compile_all(bench)
        bench.run_dry()
        alone.append((bench.received(request_id).token_ids, bench.received(request_id).logprobs))
        bench.close()
    forward_pass = FaultOfNobody(period, num_host_pages=16)
    bench = new_bench(
        compiler, num_pages=10, num_host_pages=16, capacity=capacity, max_batch_tokens=8, forward_pass=forward_pass
    )
    for request_id in range(4):
        ask_embedded(bench, request_id)
        bench.submit([request_id, 1, 2, 3, 4, 5, 6], 24, request_id=100 + request_id)
    compile_all(bench)
    bench.run_dry()
    assert bench.board.pages_restored > 0
    assert forward_pass.num_steps > 15
    for request_id, (token_ids, logprobs) in enumerate(alone):
        assert text(bench, request_id).isdigit()
        received = bench.received(request_id)
        assert (received.token_ids, received.logprobs) == (token_ids, logprobs)
        prompt = [request_id, 1, 2, 3, 4, 5, 6]
        assert bench.received(100 + request_id).token_ids == expected_tokens(prompt, 24, VOCAB_SIZE)
    bench.close()


def test_requests_coalesce_only_with_the_same_grammar(compiler: GrammarCache) -> None:
    bench = new_bench(compiler)
    letters = Grammar("regex", "[a-f]{5}")
    for request_id, grammar in enumerate((DIGITS, DIGITS, letters)):
        ask(bench, request_id, grammar, may_share=True)
    compile_all(bench)
    bench.run_dry()
    assert bench.board.requests_coalesced == 1
    assert text(bench, 0) == text(bench, 1) != text(bench, 2)


def test_min_tokens_delays_the_end(compiler: GrammarCache) -> None:
    expected = expected_tokens(PROMPT, 8, VOCAB_SIZE)
    bench = new_bench(compiler)
    for request_id, min_tokens in enumerate((0, 4)):
        constraints = Constraints(min_tokens=min_tokens)
        bench.submit(PROMPT, 8, request_id=request_id, stop_ids=(expected[0],), constraints=constraints)
    bench.run_dry()
    assert bench.received(0).token_ids == expected[:1]
    assert len(bench.received(1).token_ids) >= 4
    assert expected[0] not in bench.received(1).token_ids[:4]


def test_resumed_stream_continues_its_grammar(compiler: GrammarCache) -> None:
    bench = new_bench(compiler)
    ask(bench, 0)
    compile_all(bench)
    bench.run_dry()
    whole = bench.received(0).token_ids
    constraints = Constraints(grammar=DIGITS)
    bench.submit(
        PROMPT + whole[:2], 12, request_id=1, num_prompt_tokens=len(PROMPT), stop_ids=(EOS,), constraints=constraints
    )
    bench.run_dry()
    assert bench.received(1).token_ids == whole[2:]


def test_constraints_that_allow_no_token_fail_only_their_own_request(compiler: GrammarCache) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, allowed_token_ids=tuple(tokens_of("x")))
    ask(bench, 1)
    compile_all(bench)
    bench.run_dry()
    received = bench.received(0)
    assert (received.token_ids, received.finishes) == ([], [Finish.FAILED])
    assert received.failure is not None
    assert received.failure.code == FailureCode.BAD_GRAMMAR
    assert text(bench, 1).isdigit()


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_constraints_that_fail_mid_answer_end_only_their_request_at_once(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SequenceConstraints.fill_mask

    def fail(constraints: SequenceConstraints, *args: Any) -> None:
        original(constraints, *args)
        if constraints.num_tokens == 6:
            raise ConstraintFailed("a limit is met")

    monkeypatch.setattr(SequenceConstraints, "fill_mask", fail)
    bench = Bench(capacity=capacity, page_size=16)
    bench.submit(PROMPT, 20, request_id=0, constraints=Constraints(min_tokens=1))
    bench.submit(PROMPT, 20, request_id=1)
    bench.run_dry()
    received, expected = bench.received(0), expected_tokens(PROMPT, 20, bench.vocab_size)
    assert received.token_ids == expected[:6]
    assert received.finishes == [Finish.FAILED]
    assert received.failure is not None
    assert (received.failure.code, received.failure.text) == (FailureCode.BAD_GRAMMAR, "a limit is met")
    assert bench.received(1).token_ids == expected


def test_stop_ids_outside_the_vocabulary_are_ignored() -> None:
    bench = Bench()
    bench.submit(PROMPT, 4, stop_ids=(1 << 30,), constraints=Constraints(min_tokens=2))
    bench.run_dry()
    assert bench.received().token_ids == expected_tokens(PROMPT, 4, bench.vocab_size)


def test_constraints_with_tokens_outside_the_vocabulary_are_refused() -> None:
    bench = Bench()
    named = ({"allowed_token_ids": (999,)}, {"bad_words": ((1, 999),)}, {"thinking_end": (999,)})
    for request_id, fields in enumerate(named):
        bench.submit(PROMPT, 4, request_id=request_id, constraints=Constraints(**fields))
    bench.run_dry()
    for request_id in range(len(named)):
        failure = bench.received(request_id).failure
        assert failure is not None
        assert (failure.code, failure.limit) == (FailureCode.BAD_TOKEN, bench.vocab_size)
