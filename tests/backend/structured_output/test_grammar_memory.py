"""All grammars in use share a bounded memory, and each tenant its part of it."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.structured_output import grammar_costs
from penstock.backend.structured_output.compile_pool import CompilePool
from penstock.backend.structured_output.constraints import ConstraintFailed, SequenceConstraints
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_costs import GrammarMemory, GrammarMemoryFull
from penstock.backend.structured_output.late_masks import LateMasks, MaskedRow, fill_masks
from penstock.shm.messages import Constraints, FailureCode, Finish, Grammar
from tests.backend.structured_output.constrained import EOS, TOKENIZER_JSON, VOCAB_SIZE, ask, compile_all, new_bench

_WIDE = " | ".join(f"b{index}" for index in range(300))
WIDE = Grammar("lark", f"start: ({_WIDE})+\n" + "\n".join(f'b{index}: "x" "x"' for index in range(300)))
"""Its parser keeps hundreds of items for each byte."""


def hungry(letter: str) -> Grammar:
    """Its lexer makes a new state for nearly every text: 31 MB for 50 tokens."""
    return Grammar("regex", r"(.|\n)*[aeioust ](.|\n){60}" + letter)


class Setup:
    def __init__(self, limit_bytes: int) -> None:
        self.memory = GrammarMemory(limit_bytes)
        self.compiler = GrammarCache(CompilePool(TOKENIZER_JSON, VOCAB_SIZE, (EOS,)), self.memory)

    def start(self, grammar: Grammar, tenant: bytes) -> SequenceConstraints:
        compiled = self.compiler.find_compiled(grammar)
        if compiled is None:
            future = self.compiler.compile(grammar, tenant)
            wait([future], timeout=30)
            compiled = self.compiler.take_result(grammar, future, tenant)
        requested = Constraints(grammar=grammar)
        return SequenceConstraints(requested, compiled, frozenset([EOS]), VOCAB_SIZE, tenant=tenant)


@pytest.fixture
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """Measures after each mask: otherwise the machine's speed decides when."""
    monkeypatch.setattr(grammar_costs, "_READ_AFTER_NS", 0)
    monkeypatch.setattr(grammar_costs, "_NUM_READING_TIMES", 0)
    setup = Setup(request.param << 20)
    yield setup
    setup.compiler.close()


def use(constraints: SequenceConstraints, num_tokens: int, seed: int = 1) -> str:
    """Generate tokens; return why the constraints failed, if they did."""
    rng, mask = random.Random(seed), np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    for _ in range(num_tokens):
        try:
            constraints.fill_mask(mask)
        except ConstraintFailed as error:
            return str(error)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        constraints.advance(rng.choice([token_id for token_id in ids if token_id != EOS]))
    return ""


FULL = "all grammars in use together take more memory than the limit of 64 MiB"


@pytest.mark.parametrize("setup", [64], indirect=True)
def test_growth_of_one_tenant_fails_at_the_limit_and_another_tenant_goes_on(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_costs, "_COPIED_BYTES_PER_NS", 0)  # only lexers count: their work is no matter of time
    flood = [setup.start(hungry(letter), b"flood") for letter in "xyz"]
    assert FULL in "".join(use(each, 20, seed) for seed, each in enumerate(flood))
    other = setup.start(hungry("w"), b"other")
    assert use(other, 10) == ""
    assert setup.memory.num_bytes > 64 << 20
    assert any(FULL in use(each, 20, seed) for seed, each in enumerate(flood))
    assert setup.memory.num_bytes <= 2 * 64 << 20


@pytest.mark.parametrize("setup", [8], indirect=True)
def test_memory_of_a_failed_stream_is_given_back_at_once(setup: Setup) -> None:
    """The garbage collector is not needed: an exception must not keep the matcher alive."""
    late_masks = LateMasks(VOCAB_SIZE, lambda: None)
    gc.disable()
    try:
        for is_late in (False, True):
            constraints = setup.start(hungry("x"), b"")
            rng, num_tokens, failures = random.Random(1), 0, dict[int, str]()
            while not failures:
                if is_late:
                    late_masks._begin(constraints, (), num_tokens)
                    while constraints.awaits_mask:
                        pass
                masks, failures, _ = fill_masks([MaskedRow(0, num_tokens, constraints, [0])], VOCAB_SIZE, late_masks)
                if masks is not None:
                    ids = np.flatnonzero(np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")).tolist()
                    constraints.advance(rng.choice([token_id for token_id in ids if token_id != EOS]))
                    num_tokens += 1
            assert "limit of 8 MiB" in failures[0]
            assert setup.memory.num_bytes > 4 << 20
            del constraints
            setup.compiler.find_compiled(hungry("x"))  # drops it from the cache
            assert setup.memory.num_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("setup", [64], indirect=True)
def test_parser_of_one_stream_has_a_limit(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_costs, "_MAX_PARSER_BYTES", 4 << 20)
    assert use(setup.start(Grammar("regex", "[0-9]{3,3000}"), b""), 400) == ""
    assert "its parser takes more memory than the limit of 4 MiB" in use(setup.start(WIDE, b""), 1500)


@pytest.mark.parametrize("setup", [64], indirect=True)
def test_parsers_of_all_streams_count(setup: Setup) -> None:
    first = setup.start(WIDE, b"")
    use(first, 200)
    before = setup.memory.num_bytes
    second = setup.start(WIDE, b"")
    use(second, 800)
    assert setup.memory.num_bytes > before + (1 << 20)
    del second
    assert setup.memory.num_bytes <= before + (1 << 20)


@pytest.mark.parametrize("setup", [0], indirect=True)
def test_grammar_is_refused_while_the_memory_is_full_and_not_remembered_as_bad(setup: Setup) -> None:
    bench = new_bench(setup.compiler)
    ask(bench, 0)
    compile_all(bench)
    received = bench.received(0)
    assert received.finishes == [Finish.REJECTED]
    assert received.failure is not None
    assert received.failure.code == FailureCode.OVERLOADED
    assert "the limit of 0 MiB" in received.failure.text
    assert received.failure.retry_after_s >= 1
    setup.compiler._memory = GrammarMemory()
    ask(bench, 1)
    compile_all(bench)
    bench.run_dry()
    assert bench.received(1).finishes == [Finish.STOP]


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 60)), max_size=40))
def test_memory_counts_what_is_held_and_never_exceeds_twice_the_limit(sizes: list[tuple[bytes, int]]) -> None:
    memory = GrammarMemory(100)
    held = [Counter[bytes]() for _ in range(4)]
    for index, (tenant, num_bytes) in enumerate(sizes):
        one = held[index % 4]
        before = one.total()
        try:
            memory.resize(one, num_bytes, tenant)
        except GrammarMemoryFull:
            assert one.total() == before
            assert memory.num_bytes + num_bytes - before > 100
        assert memory.num_bytes == sum(each.total() for each in held) <= 200
        assert all(count >= 0 for each in held for count in each.values())
    for each in held:
        memory.give_back(each)
    assert memory.num_bytes == 0
