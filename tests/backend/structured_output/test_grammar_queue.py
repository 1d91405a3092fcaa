"""Requests that wait until their grammar is compiled: limits, cancellation, deadlines, errors."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from penstock.backend.structured_output.compile_grammar import CompiledGrammar, compile_grammar, load_tokenizer
from penstock.backend.structured_output.compile_pool import CompileTurns
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import FailureCode, Finish, Grammar
from tests.backend.harness import Bench
from tests.backend.structured_output.constrained import (
    DIGITS,
    EOS,
    PROMPT,
    TOKENIZER_JSON,
    VOCAB_SIZE,
    ask,
    compile_all,
    new_bench,
    new_compiler,
    text,
)


@pytest.mark.parametrize("grammar", [Grammar("regex", "("), Grammar("json_schema", '{"type": "nonsense"}')])
def test_bad_grammar_rejects_only_its_own_request(compiler: GrammarCache, grammar: Grammar) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, grammar)
    ask(bench, 1, grammar)
    ask(bench, 2)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 2).isdigit()
    ask(bench, 3, grammar)
    bench.engine.turn()  # the error is cached: nothing is compiled again
    for request_id in (0, 1, 3):
        received = bench.received(request_id)
        assert received.finishes == [Finish.REJECTED]
        assert received.failure is not None
        assert received.failure.code == FailureCode.BAD_GRAMMAR
        assert received.failure.text


def test_request_cancelled_while_its_grammar_compiles_leaves_nothing_behind(compiler: GrammarCache) -> None:
    bench = new_bench(compiler)
    ask(bench, 0)
    ask(bench, 1, frontend=2)
    bench.engine.turn()
    assert bench.requests.table.num_open == 2
    bench.cancel(0)
    bench.link.arrivals.append(FrontendDeath(2))
    bench.link.dead.add(2)
    bench.engine.turn()
    assert bench.requests.table.num_open == 0
    compile_all(bench)
    assert bench.run_dry() == 0
    assert bench.board.requests_cancelled == bench.board.requests_accepted == 2


def test_grammar_whose_request_is_cancelled_while_it_compiles_is_cached_in_bounded_memory() -> None:
    pool = HeldPool()
    compiler = GrammarCache(pool)
    bench = new_bench(compiler)
    ask(bench, 0)
    bench.engine.turn()
    turn = pool.turns.take()
    assert turn is not None
    bench.cancel(0)
    compiled = compile_grammar(load_tokenizer(TOKENIZER_JSON, VOCAB_SIZE, (EOS,)), DIGITS)
    turn[1].set_result(CompiledGrammar(compiled, EOS, 16 << 20))
    bench.engine.turn()
    assert compiler._pending == {}
    assert compiler._num_bytes == 16 << 20
    ask(bench, 1)
    bench.run_dry()
    assert text(bench, 1).isdigit()


def test_requests_beyond_the_limit_of_waiting_grammars_are_refused(compiler: GrammarCache) -> None:
    bench = new_bench(compiler, max_waiting=1)
    ask(bench, 0)
    ask(bench, 1)
    bench.engine.turn()
    failure = bench.received(1).failure
    assert failure is not None
    assert (failure.code, failure.limit) == (FailureCode.OVERLOADED, 1)
    assert failure.retry_after_s >= 1


def test_unreadable_tokenizer_fails_only_requests_with_grammars(tmp_path: Path) -> None:
    compiler = new_compiler(tokenizer_json=tmp_path / "no such file")
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


def test_abandoned_grammars_free_their_place_in_the_compiler(
    compiler: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.backend.structured_output.grammar_cache.MAX_PENDING", 2)
    bench = new_bench(compiler)
    for request_id in range(2):
        ask(bench, request_id, Grammar("regex", "[0-9]" * (request_id + 1)))
    ask(bench, 2)
    bench.engine.turn()
    failure = bench.received(2).failure
    assert failure is not None
    assert failure.code == FailureCode.OVERLOADED
    queue = bench.requests.table.grammar_queue
    for request_id, waiting in enumerate(list(queue._waiting.values())):
        bench.cancel(request_id)
        waiting.future.exception(timeout=30)
    while len(queue._done) < 2:
        pass  # the compiler's thread is about to report it
    bench.engine.turn()
    ask(bench, 3)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 3).isdigit()


class HeldPool:
    """Compiles nothing by itself. Replaces CompilePool."""

    def __init__(self) -> None:
        self.turns = CompileTurns(max_per_tenant=1)

    def submit(self, grammar: Grammar, tenant: bytes) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        self.turns.put(tenant, future, grammar)
        return future

    def add_tenant(self, future: Future[CompiledGrammar], grammar: Grammar, tenant: bytes) -> None:
        self.turns.put(tenant, future, grammar)

    def cancel(self, future: Future[CompiledGrammar]) -> bool:
        self.turns.discard(future)
        return future.cancel()

    def close(self) -> None:
        pass

    def begin_all(self) -> list[tuple[bytes, str]]:
        """(tenant, expression) in the order of their turns, as if each took no time."""
        begun = []
        while (turn := self.turns.take()) is not None:
            tenant, _, grammar = turn
            begun.append((tenant, grammar.text))
            self.turns.end(tenant)
        return begun


def test_grammars_of_cancelled_requests_are_not_compiled() -> None:
    pool = HeldPool()
    bench = new_bench(GrammarCache(pool))
    letters = Grammar("regex", "[a-f]{5}")
    ask(bench, 0, letters)
    for request_id in (1, 2):
        ask(bench, request_id)
    ask(bench, 3, letters, frontend=2, tenant=b"other")
    bench.engine.turn()
    bench.cancel(0)
    bench.cancel(1)
    bench.link.arrivals.append(FrontendDeath(2))
    bench.engine.turn()
    assert pool.begin_all() == [(b"", DIGITS.text)]


def test_tenants_take_turns_and_equal_grammars_come_up_at_the_first_of_their_turns() -> None:
    pool = HeldPool()
    bench = new_bench(GrammarCache(pool))
    asked = [(b"a", "1"), (b"a", "2"), (b"a", "3"), (b"b", "4"), (b"b", "3"), (b"c", "4")]
    for request_id, (tenant, expression) in enumerate(asked):
        ask(bench, request_id, Grammar("regex", expression), tenant=tenant)
    bench.engine.turn()
    assert pool.begin_all() == [(b"a", "1"), (b"b", "4"), (b"a", "2"), (b"b", "3")]


def test_tenant_with_a_busy_compiler_waits_while_others_go_on() -> None:
    turns, futures = CompileTurns(max_per_tenant=1), [Future[CompiledGrammar]() for _ in range(3)]
    for tenant, future in zip((b"a", b"a", b"b"), futures, strict=True):
        turns.put(tenant, future, DIGITS)
    assert [turn[0] for turn in (turns.take(), turns.take()) if turn is not None] == [b"a", b"b"]
    assert turns.take() is None
    turns.end(b"a")
    assert turns.take() == (b"a", futures[1], DIGITS)


def test_flood_of_one_tenant_leaves_places_to_another() -> None:
    bench = new_bench(GrammarCache(HeldPool()), max_waiting=4)
    for request_id in range(6):
        ask(bench, request_id, Grammar("regex", f"a{request_id}"), tenant=b"flood")
    for request_id in range(6, 9):
        ask(bench, request_id, Grammar("regex", f"b{request_id}"), tenant=b"other")
    bench.engine.turn()
    refused = {request_id for request_id in range(9) if bench.received(request_id).finishes}
    assert refused == {4, 5, 8}


def test_resumed_requests_are_not_refused_for_waiting_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.structured_output.grammar_cache.MAX_PENDING", 1)
    bench = new_bench(GrammarCache(HeldPool()), max_waiting=1)
    for request_id in range(4):
        ask(bench, request_id, Grammar("regex", f"a{request_id}"), admitted_ns=1 + request_id)
    bench.engine.turn()
    assert not any(bench.received(request_id).finishes for request_id in range(4))


def test_drain_ends_although_a_grammar_does_not() -> None:
    bench = new_bench(GrammarCache(HeldPool()))
    ask(bench, 0)
    bench.engine.turn()
    bench.engine.drain(100.0)
    bench.engine.turn()
    assert bench.received(0).finishes == []
    bench.now_s = 1.5
    bench.engine.turn()
    failure = bench.received(0).failure
    assert failure is not None
    assert failure.code == FailureCode.SHUTTING_DOWN
    assert bench.engine._is_drained()


def test_deadline_counts_from_arrival_while_a_grammar_compiles(compiler: GrammarCache) -> None:
    bench = new_bench(compiler)
    ask(bench, 0, timeout_ms=1000)
    ask(bench, 1, timeout_ms=3000, max_tokens=200)
    bench.engine.turn()
    bench.now_s = 2.0
    bench.requests.canceller.expire()
    assert bench.received(0).finishes == [Finish.EXPIRED]
    compile_all(bench)
    assert bench.received(1).finishes == []
    bench.now_s = 3.5
    bench.engine.turn()
    assert bench.received(1).finishes == [Finish.EXPIRED]
    board = bench.board
    assert (board.requests_accepted, board.requests_expired, bench.requests.table.num_open) == (2, 2, 0)


def test_draining_serves_requests_that_wait_for_grammars(compiler: GrammarCache) -> None:
    bench = new_bench(compiler)
    ask(bench, 0)
    bench.engine.turn()
    bench.engine.drain(100.0)
    assert not bench.engine._is_drained()
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 0).isdigit()
    assert bench.engine._is_drained()


def test_grammars_are_refused_without_a_tokenizer() -> None:
    bench = Bench()
    ask(bench, 0)
    bench.run_dry()
    failure = bench.received(0).failure
    assert failure is not None
    assert failure.code == FailureCode.BAD_GRAMMAR


def test_request_that_fails_after_it_has_begun_to_wait_waits_no_more(
    compiler: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(compiler)
    with monkeypatch.context() as patch:
        patch.setattr(bench.requests.table.deadlines, "note", lambda *_: 1 / 0)
        ask(bench, 0)
        bench.engine.turn()
    assert bench.requests.table.num_open == 0
    compile_all(bench)
    bench.run_dry()
    assert bench.received(0).finishes == [Finish.FAILED]
    assert bench.board.requests_accepted == bench.board.requests_failed == 1
