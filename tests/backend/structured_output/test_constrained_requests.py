"""Grammars, lists of tokens and log probabilities through the whole engine, with the demo model's tokenizer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.forward_pass import PendingOutput, SamplingParams, StepBatch, TokenMasks
from penstock.backend.passes.fake import FakePass
from penstock.backend.structured_output.constraints import ConstraintFailed, SequenceConstraints
from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import Constraints, FailureCode, Finish, Grammar, Sampling
from tests.backend.buffers.test_shared_prompts import random_rows, submit_embedded
from tests.backend.engine.test_loop import PassingFault
from tests.backend.harness import Bench, expected_tokens
from tests.backend.structured_output.test_constraints import EOS, TOKENIZER, TOKENIZER_JSON

VOCAB_SIZE = TOKENIZER.get_vocab_size()
DIGITS = Grammar("regex", "[0-9]{5,8}")
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER_JSON, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()


def new_bench(compiler: GrammarCompiler, max_waiting: int = 100, **options: Any) -> Bench:
    return Bench(vocab_size=VOCAB_SIZE, grammar_queue=GrammarQueue(compiler, lambda: None, max_waiting), **options)


def ask(bench: Bench, request_id: int, grammar: Grammar | None = DIGITS, max_tokens: int = 12, **options: Any) -> None:
    wanted = {name: options.pop(name) for name in list(options) if name in Constraints.__struct_fields__}
    constraints = Constraints(grammar=grammar, **wanted)
    bench.submit(PROMPT, max_tokens, request_id=request_id, stop_ids=(EOS,), constraints=constraints, **options)


def compile_all(bench: Bench) -> None:
    """Turns until no request waits for its grammar any more."""
    bench.engine.turn()
    for waiting in list(bench.requests._grammar_queue._waiting.values()):
        waiting.future.exception(timeout=30)
    while len(bench.requests._grammar_queue._done) < bench.requests._grammar_queue.num_waiting:
        pass  # the compiler's thread is about to say so
    bench.engine.turn()


def text(bench: Bench, request_id: int) -> str:
    received = bench.received(request_id)
    assert received.finishes == [Finish.STOP]
    return TOKENIZER.decode(received.token_ids)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.5, seed=3)])
def test_a_grammar_binds_its_own_request_and_no_other(compiler: GrammarCompiler, sampling: Sampling) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, sampling=sampling)
    bench.submit(PROMPT, 6, request_id=1)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 0).isdigit()
    assert 5 <= len(text(bench, 0)) <= 8
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 6, VOCAB_SIZE)


def test_the_same_tokens_come_alone_among_others_preempted_and_in_any_chunks(compiler: GrammarCompiler) -> None:
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
def test_a_step_that_fails_and_runs_again_leaves_the_grammar_where_it_was(
    compiler: GrammarCompiler, is_late: bool
) -> None:
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
    """Of the steps of several rows each period-th one fails, when it has sampled."""

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
def test_a_grammar_and_a_prompt_of_embeddings_go_through_preemption_restored_pages_and_failed_steps(
    compiler: GrammarCompiler, period: int, capacity: int
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


def test_requests_of_one_grammar_and_prompt_share_and_those_of_another_do_not(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler)
    letters = Grammar("regex", "[a-f]{5}")
    for request_id, grammar in enumerate((DIGITS, DIGITS, letters)):
        ask(bench, request_id, grammar, may_share=True)
    compile_all(bench)
    bench.run_dry()
    assert bench.board.requests_coalesced == 1
    assert text(bench, 0) == text(bench, 1) != text(bench, 2)


def test_min_tokens_puts_the_end_off(compiler: GrammarCompiler) -> None:
    expected = expected_tokens(PROMPT, 8, VOCAB_SIZE)
    bench = new_bench(compiler)
    for request_id, min_tokens in enumerate((0, 4)):
        constraints = Constraints(min_tokens=min_tokens)
        bench.submit(PROMPT, 8, request_id=request_id, stop_ids=(expected[0],), constraints=constraints)
    bench.run_dry()
    assert bench.received(0).token_ids == expected[:1]
    assert len(bench.received(1).token_ids) >= 4
    assert expected[0] not in bench.received(1).token_ids[:4]


def test_a_stream_that_resumes_goes_on_where_its_grammar_was(compiler: GrammarCompiler) -> None:
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


@pytest.mark.parametrize("grammar", [Grammar("regex", "("), Grammar("json_schema", '{"type": "nonsense"}')])
def test_a_bad_grammar_is_its_own_requests_fault(compiler: GrammarCompiler, grammar: Grammar) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, grammar)
    ask(bench, 1, grammar)
    ask(bench, 2)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 2).isdigit()
    ask(bench, 3, grammar)
    bench.engine.turn()  # what is wrong is known by now: nothing is compiled again
    for request_id in (0, 1, 3):
        received = bench.received(request_id)
        assert received.finishes == [Finish.REJECTED]
        assert received.failure is not None
        assert received.failure.code == FailureCode.BAD_GRAMMAR
        assert received.failure.text


def test_demands_that_leave_nothing_end_their_own_request_alone(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, allowed_token_ids=tuple(TOKENIZER.encode("x", add_special_tokens=False).ids))
    ask(bench, 1)
    compile_all(bench)
    bench.run_dry()
    received = bench.received(0)
    assert (received.token_ids, received.finishes) == ([], [Finish.FAILED])
    assert received.failure is not None
    assert received.failure.code == FailureCode.BAD_GRAMMAR
    assert text(bench, 1).isdigit()


def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing_behind(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler)
    ask(bench, 0)
    ask(bench, 1, frontend=2)
    bench.engine.turn()
    assert bench.requests.num_open == 2
    bench.cancel(0)
    bench.link.arrivals.append(FrontendDeath(2))
    bench.link.dead.add(2)
    bench.engine.turn()
    assert bench.requests.num_open == 0
    compile_all(bench)
    assert bench.run_dry() == 0
    assert bench.board.requests_cancelled == bench.board.requests_accepted == 2


def test_no_more_requests_wait_for_grammars_than_may(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler, max_waiting=1)
    ask(bench, 0)
    ask(bench, 1)
    bench.engine.turn()
    failure = bench.received(1).failure
    assert failure is not None
    assert (failure.code, failure.limit) == (FailureCode.OVERLOADED, 1)


@pytest.mark.parametrize("part", ["fill_mask", "advance"])
@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_constraints_that_fail_in_the_middle_end_their_own_request_with_not_a_token_more(
    part: str, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(SequenceConstraints, part)

    def fail(constraints: SequenceConstraints, *args: Any) -> None:
        original(constraints, *args)
        if constraints.num_tokens == 6:
            raise ConstraintFailed("a limit is met")

    monkeypatch.setattr(SequenceConstraints, part, fail)
    bench = Bench(capacity=capacity, page_size=16)
    bench.submit(PROMPT, 20, request_id=0, constraints=Constraints(min_tokens=1))
    bench.submit(PROMPT, 20, request_id=1)
    bench.run_dry()
    received, expected = bench.received(0), expected_tokens(PROMPT, 20, bench.vocab_size)
    assert received.token_ids == expected[: 6 if part == "fill_mask" else 5]
    assert received.finishes == [Finish.FAILED]
    assert received.failure is not None
    assert (received.failure.code, received.failure.text) == (FailureCode.BAD_GRAMMAR, "a limit is met")
    assert bench.received(1).token_ids == expected


def test_stop_ids_outside_the_vocabulary_are_never_met_and_harm_nobody() -> None:
    bench = Bench()
    bench.submit(PROMPT, 4, stop_ids=(1 << 30,), constraints=Constraints(min_tokens=2))
    bench.run_dry()
    assert bench.received().token_ids == expected_tokens(PROMPT, 4, bench.vocab_size)


def test_a_tokenizer_that_cannot_be_read_fails_those_who_need_it_and_nobody_else(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "no such file", VOCAB_SIZE, (EOS,))
    bench = new_bench(compiler)
    ask(bench, 0)
    bench.submit(PROMPT, 4, request_id=1)
    compile_all(bench)
    bench.run_dry()
    received = bench.received(0)
    assert received.finishes == [Finish.REJECTED]
    assert received.failure is not None
    assert received.failure.code == FailureCode.BAD_GRAMMAR
    assert str(tmp_path) not in received.failure.text
    assert bench.received(1).finishes == [Finish.LENGTH]
    compiler.close()


def test_grammars_whose_askers_have_left_take_no_place_from_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.backend.structured_output.grammar_compiler.MAX_PENDING", 2)
    bench = new_bench(compiler)
    for request_id in range(2):
        ask(bench, request_id, Grammar("regex", "[0-9]" * (request_id + 1)))
    ask(bench, 2)
    bench.engine.turn()
    failure = bench.received(2).failure
    assert failure is not None
    assert failure.code == FailureCode.OVERLOADED
    for request_id, waiting in enumerate(list(bench.requests._grammar_queue._waiting.values())):
        bench.cancel(request_id)
        waiting.future.exception(timeout=30)
    ask(bench, 3)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 3).isdigit()


def test_grammars_that_nobody_waits_for_any_more_are_not_compiled(compiler: GrammarCompiler) -> None:
    begun, gate = threading.Event(), threading.Event()
    compiler._worker.submit(lambda: (begun.set(), gate.wait(30)))
    begun.wait(30)
    bench = new_bench(compiler)
    letters = Grammar("regex", "[a-f]{5}")
    ask(bench, 0, letters)
    for request_id in (1, 2):
        ask(bench, request_id)
    ask(bench, 3, letters, frontend=2)
    bench.engine.turn()
    bench.cancel(0)
    bench.cancel(1)
    bench.link.arrivals.append(FrontendDeath(2))
    bench.engine.turn()
    assert [grammar.text for grammar in compiler._pending] == [DIGITS.text]
    gate.set()
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 2).isdigit()
    assert compiler.find_compiled(letters) is None


def test_a_deadline_holds_while_a_grammar_is_compiled_and_counts_from_arrival(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, timeout_ms=1000)
    ask(bench, 1, timeout_ms=3000, max_tokens=200)
    bench.engine.turn()
    bench.now_s = 2.0
    bench.requests.expire()
    assert bench.received(0).finishes == [Finish.EXPIRED]
    compile_all(bench)
    assert bench.received(1).finishes == []
    bench.now_s = 3.5
    bench.engine.turn()
    assert bench.received(1).finishes == [Finish.EXPIRED]
    board = bench.board
    assert (board.requests_accepted, board.requests_expired, bench.requests.num_open) == (2, 2, 0)


def test_draining_serves_those_who_wait_for_their_grammars(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler)
    ask(bench, 0)
    bench.engine.turn()
    bench.engine.drain(100.0)
    assert not bench.engine._is_drained()
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 0).isdigit()
    assert bench.engine._is_drained()


def test_without_a_tokenizer_grammars_are_refused() -> None:
    bench = Bench()
    ask(bench, 0)
    bench.run_dry()
    failure = bench.received(0).failure
    assert failure is not None
    assert failure.code == FailureCode.BAD_GRAMMAR


def test_tokens_outside_the_vocabulary_are_refused_wherever_they_are_named() -> None:
    bench = Bench()
    named = ({"allowed_token_ids": (999,)}, {"bad_words": ((1, 999),)}, {"thinking_end": (999,)})
    for request_id, wanted in enumerate(named):
        bench.submit(PROMPT, 4, request_id=request_id, constraints=Constraints(**wanted))
    bench.run_dry()
    for request_id in range(len(named)):
        failure = bench.received(request_id).failure
        assert failure is not None
        assert (failure.code, failure.limit) == (FailureCode.BAD_TOKEN, bench.vocab_size)


def test_each_token_comes_with_its_log_probabilities_for_late_joiners_too() -> None:
    bench = Bench()
    sampling = Sampling(temperature=0.0, num_logprobs=3)
    bench.submit(PROMPT, 8, request_id=0, sampling=sampling, may_share=True)
    bench.submit(PROMPT, 8, request_id=1)
    for _ in range(5):
        bench.turn()
    bench.submit(PROMPT, 8, request_id=2, sampling=sampling, may_share=True)
    bench.run_dry()
    first, plain, late = (bench.received(request_id) for request_id in range(3))
    assert bench.board.requests_coalesced == 1
    assert first.token_ids == plain.token_ids == late.token_ids
    assert late.logprobs == first.logprobs
    assert plain.logprobs == [None] * 8
    for token_id, told in zip(first.token_ids, first.logprobs, strict=True):
        assert told is not None
        assert (told.top_ids[0], told.rank) == (token_id, 1)
        assert told.top_logprobs[0] == told.logprob > told.top_logprobs[1]
        assert len(told.top_ids) == 3


def test_rows_that_ask_for_fewer_log_probabilities_are_told_fewer() -> None:
    bench = Bench()
    for request_id, count in enumerate((0, 5)):
        bench.submit(PROMPT, 4, request_id=request_id, sampling=Sampling(temperature=0.0, num_logprobs=count))
    bench.run_dry()
    for request_id, count in enumerate((0, 5)):
        told = bench.received(request_id).logprobs
        assert [len(entry.top_ids) for entry in told if entry is not None] == [count] * 4


@pytest.mark.parametrize(("may_share", "num_kept"), [(True, 5), (False, None)])
def test_log_probabilities_are_kept_only_for_who_may_come_late(may_share: bool, num_kept: int | None) -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, sampling=Sampling(temperature=0.0, num_logprobs=1), may_share=may_share)
    while len(bench.received().token_ids) < 5:
        bench.turn()
    kept = bench.requests._open[1][0][0].kept_logprobs
    assert (len(kept) if kept is not None else None) == num_kept
    assert None not in bench.received().logprobs


def test_wire_and_pass_name_the_same_parameters() -> None:
    assert Sampling.__struct_fields__ == tuple(SamplingParams.__slots__)


@pytest.mark.parametrize("num_logprobs", [-1, 1])
def test_a_scored_prompt_is_told_what_the_model_thought_of_each_token(num_logprobs: int) -> None:
    bench = Bench()
    true_start = expected_tokens(PROMPT, 3, bench.vocab_size)
    prompt = [*PROMPT, *true_start, 1, 2]
    sampling = Sampling(temperature=0.0, num_logprobs=num_logprobs)
    bench.submit(prompt, 4, request_id=0, sampling=sampling, num_prompt_logprobs=2, may_share=True)
    bench.submit(prompt, 4, request_id=1, sampling=sampling, may_share=True)
    bench.run_dry()
    scored, plain = bench.received(0), bench.received(1)
    assert scored.token_ids == plain.token_ids == expected_tokens(prompt, 4, bench.vocab_size)
    assert [entry.event for entry in scored.prompt_logprobs] == list(range(1, len(prompt)))
    assert all(len(entry.top_ids) == 2 for entry in scored.prompt_logprobs)
    likeliest = [entry.rank == 1 for entry in scored.prompt_logprobs]
    assert likeliest[len(PROMPT) - 1 : len(PROMPT) + 2] == [True] * 3
    assert scored.prompt_logprobs[len(PROMPT) - 1].top_ids[0] == true_start[0]
    assert [entry is not None for entry in scored.logprobs] == [num_logprobs >= 0] * 4
    assert plain.prompt_logprobs == []
