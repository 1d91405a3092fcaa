"""The compiling children: real processes, real limits."""

from __future__ import annotations

import errno
import json
import os
import signal
import string
import time
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.backend.structured_output.compile_pool import CompilePool, CompilerFailed
from penstock.backend.structured_output.compiler_process import CompileLimits, CompilerProcess, TokenizerUnusable
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_costs import BadGrammar
from penstock.shm.messages import Grammar
from tests.backend.structured_output.constrained import DIGITS, EOS, TOKENIZER_JSON, VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator


def hostile(num_patterns: int = 30) -> Grammar:
    """Its compilation takes twice the time with each pattern, and 50 MB/s of memory."""
    patterns = [{"pattern": f".*{letter}.*"} for letter in string.ascii_letters[:num_patterns]]
    return Grammar("json_schema", json.dumps({"type": "string", "allOf": patterns}))


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    # On a fast CPU the hostile grammar would reach the default limit of memory before that of time.
    limits = CompileLimits(timeout_s=2.0, memory_bytes=1 << 30)
    pool = CompilePool(TOKENIZER_JSON, VOCAB_SIZE, (EOS,), limits)
    yield pool
    pool.close()


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) / 1024


def test_hostile_grammar_is_refused_at_its_limit_and_holds_up_no_other_tenant(pool: CompilePool) -> None:
    pool.submit(DIGITS, b"warm").result(timeout=60)
    before_mib, began_s = resident_mib(), time.monotonic()
    refused = [pool.submit(hostile(num_patterns), b"hostile") for num_patterns in (30, 29)]
    others = [pool.submit(Grammar("regex", f"[a-f]{{{count}}}"), b"other") for count in range(1, 5)]
    assert not wait(others, timeout=60).not_done
    assert not any(future.done() for future in refused)
    for future in others:
        assert not future.result().matcher.is_error()
    with pytest.raises(BadGrammar, match=r"longer than the limit of 2 s"):
        refused[0].result(timeout=60)
    assert time.monotonic() - began_s < 30
    assert resident_mib() - before_mib < 50
    began_s = time.monotonic()
    pool.close()  # while the second one compiles
    assert time.monotonic() - began_s < 10


def test_grammar_that_needs_too_much_memory_is_refused() -> None:
    limits = CompileLimits(timeout_s=60.0, memory_bytes=8 << 20)
    child = CompilerProcess(TOKENIZER_JSON, VOCAB_SIZE, (EOS,), limits)
    with pytest.raises(BadGrammar, match="more memory than the limit of 8 MiB"):
        child.compile(hostile())
    assert not child.is_alive
    child.close()


def test_compiled_grammar_that_is_too_large_is_refused_and_the_child_goes_on() -> None:
    child = CompilerProcess(TOKENIZER_JSON, VOCAB_SIZE, (EOS,), CompileLimits(timeout_s=60.0, compiled_bytes=200 << 10))
    schema = {"type": "object", "properties": {f"name {number}": {"type": "string"} for number in range(150)}}
    with pytest.raises(BadGrammar, match="compiled it takes"):
        child.compile(Grammar("json_schema", json.dumps(schema)))
    assert 0 < child.compile(DIGITS).num_bytes < 200 << 10
    child.close()


def test_killed_child_loses_no_grammar_and_one_that_always_dies_is_given_up(pool: CompilePool) -> None:
    pool.submit(DIGITS, b"").result(timeout=60)
    victim = pool.pids[0]
    os.kill(victim, signal.SIGSTOP)
    stopped = pool.submit(Grammar("regex", "[a-c]+"), b"")
    other = pool.submit(Grammar("regex", "[a-d]+"), b"other")
    os.kill(victim, signal.SIGKILL)
    assert not stopped.result(timeout=60).matcher.is_error()
    assert not other.result(timeout=60).matcher.is_error()
    doomed = pool.submit(hostile(), b"")
    while not doomed.done():
        for pid in pool.pids:
            with suppress(ProcessLookupError):  # it was killed in the last round
                os.kill(pid, signal.SIGKILL)
        wait([doomed], timeout=0.05)
    with pytest.raises(CompilerFailed):
        doomed.result()
    assert not pool.submit(Grammar("regex", "[a-e]+"), b"").result(timeout=60).matcher.is_error()


def test_shortage_of_processes_does_not_make_a_grammar_bad(pool: CompilePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    compiler = GrammarCache(pool)
    with monkeypatch.context() as shortage:
        shortage.setattr("subprocess.Popen", fail)
        failed = compiler.compile(DIGITS)
        wait([failed], timeout=60)
    with pytest.raises(CompilerFailed):
        compiler.take_result(DIGITS, failed)
    compiled = compiler.compile(DIGITS)
    wait([compiled], timeout=60)
    assert not compiler.take_result(DIGITS, compiled).matcher.is_error()


def test_unusable_tokenizer_is_told_apart_from_a_bad_grammar(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(TokenizerUnusable):
        CompilerProcess(path, VOCAB_SIZE, (EOS,), CompileLimits())


def test_model_without_an_end_token_compiles_no_grammar_and_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = CompilePool(TOKENIZER_JSON, VOCAB_SIZE, (), CompileLimits())
    compiler = GrammarCache(pool)
    failed = compiler.compile(DIGITS)
    wait([failed], timeout=60)
    pool.close()
    with pytest.raises(BadGrammar, match="no grammar can be compiled for this model's tokenizer"):
        compiler.take_result(DIGITS, failed)
    assert [record.exc_info for record in caplog.records] == [None]
