"""Requests that wait until their grammar is compiled: limits, cancellation, deadlines, errors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import FailureCode, Finish, Grammar
from tests.backend.harness import Bench
from tests.backend.structured_output.constrained import (
    DIGITS,
    EOS,
    PROMPT,
    VOCAB_SIZE,
    ask,
    compile_all,
    new_bench,
    text,
)


@pytest.mark.parametrize("grammar", [Grammar("regex", "("), Grammar("json_schema", '{"type": "nonsense"}')])
def test_bad_grammar_rejects_only_its_own_request(compiler: GrammarCompiler, grammar: Grammar) -> None:
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


def test_request_cancelled_while_its_grammar_compiles_leaves_nothing_behind(compiler: GrammarCompiler) -> None:
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


def test_requests_beyond_the_limit_of_waiting_grammars_are_refused(compiler: GrammarCompiler) -> None:
    bench = new_bench(compiler, max_waiting=1)
    ask(bench, 0)
    ask(bench, 1)
    bench.engine.turn()
    failure = bench.received(1).failure
    assert failure is not None
    assert (failure.code, failure.limit) == (FailureCode.OVERLOADED, 1)


def test_unreadable_tokenizer_fails_only_requests_with_grammars(tmp_path: Path) -> None:
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


def test_abandoned_grammars_free_their_place_in_the_compiler(
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
    for request_id, waiting in enumerate(list(bench.requests.table.grammar_queue._waiting.values())):
        bench.cancel(request_id)
        waiting.future.exception(timeout=30)
    ask(bench, 3)
    compile_all(bench)
    bench.run_dry()
    assert text(bench, 3).isdigit()


def test_grammars_of_cancelled_requests_are_not_compiled(compiler: GrammarCompiler) -> None:
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


def test_deadline_counts_from_arrival_while_a_grammar_compiles(compiler: GrammarCompiler) -> None:
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


def test_draining_serves_requests_that_wait_for_grammars(compiler: GrammarCompiler) -> None:
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
