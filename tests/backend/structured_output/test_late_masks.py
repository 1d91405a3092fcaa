"""Rows whose masks take long wait for them outside the steps, and nobody else does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from penstock.backend.structured_output import compile_grammar as grammars
from penstock.backend.structured_output import late_masks as late_masks_module
from penstock.backend.structured_output.constraints import LateMask, SequenceConstraints
from penstock.backend.structured_output.grammar_costs import Pace
from penstock.backend.structured_output.late_masks import LateMasks, MaskTurns
from penstock.shm.messages import Constraints, FailureCode, Finish, Grammar, Sampling
from tests.backend.harness import Bench, expected_tokens
from tests.backend.structured_output.constrained import EOS, PROMPT, VOCAB_SIZE, ask, compile_all, new_bench, tokens_of

if TYPE_CHECKING:
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.structured_output.grammar_cache import GrammarCache

AMBIGUOUS = Grammar("lark", "start: a\na: a a | /[a-z]/")
DIGITS_AND_SPACES = Grammar("regex", "[0-9]{3,20}( [0-9]{1,3})?")
DRAWN = Sampling(temperature=1.0, seed=9)


class HeldLateMasks(LateMasks):
    """Fills nothing until it is released."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, lambda: None)
        self.released = threading.Event()

    def work_on(self, late: LateMask) -> bool:
        self.released.wait(60)
        return super().work_on(late)


@pytest.fixture
def all_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "is_slow", True)


def run_alone(compiler: GrammarCache, grammar: Grammar, **options: Any) -> Bench:
    bench = new_bench(compiler, **options)
    ask(bench, 0, grammar, max_tokens=24, sampling=DRAWN)
    compile_all(bench)
    bench.run_dry()
    return bench


@pytest.mark.usefixtures("all_slow")
@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_row_waits_for_its_mask_and_its_neighbours_do_not(compiler: GrammarCache, capacity: int) -> None:
    late_masks = HeldLateMasks()
    bench = new_bench(compiler, capacity=capacity, late_masks=late_masks)
    ask(bench, 0, DIGITS_AND_SPACES, sampling=DRAWN)
    bench.submit(PROMPT, 20, request_id=1)
    compile_all(bench)
    while not bench.received(1).finishes:
        bench.turn()
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 20, VOCAB_SIZE)
    assert bench.received(0).token_ids == []
    assert bench.board.steps < 40
    late_masks.released.set()
    bench.run_dry(10_000_000)
    alone = run_alone(compiler, DIGITS_AND_SPACES).received(0).token_ids
    assert bench.received(0).token_ids == alone[:12]


@pytest.mark.usefixtures("all_slow")
def test_error_in_planning_a_late_row_again_fails_that_request_alone(
    compiler: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = new_bench(compiler, late_masks=LateMasks(VOCAB_SIZE, lambda: None))
    note_computed = bench.scheduler.note_computed

    def broken(sequence: Sequence, num_tokens: int) -> None:
        if sequence.constraints is not None:
            raise LookupError("planted")
        note_computed(sequence, num_tokens)

    monkeypatch.setattr(bench.scheduler, "note_computed", broken)
    ask(bench, 0, DIGITS_AND_SPACES, sampling=DRAWN)
    bench.submit(PROMPT, 20, request_id=1)
    compile_all(bench)
    bench.run_dry()
    assert bench.received(0).finishes == [Finish.FAILED]
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 20, VOCAB_SIZE)
    assert bench.pool.num_held == 0


@pytest.mark.usefixtures("all_slow")
@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_tokens_do_not_depend_on_late_masks_preemption_or_chunks(compiler: GrammarCache, capacity: int) -> None:
    expected = run_alone(compiler, DIGITS_AND_SPACES).received(0).token_ids
    bench = new_bench(
        compiler, num_pages=12, max_batch_tokens=8, capacity=capacity, late_masks=LateMasks(VOCAB_SIZE, lambda: None)
    )
    for request_id in range(5):
        ask(bench, request_id, DIGITS_AND_SPACES, max_tokens=24, sampling=DRAWN)
        bench.submit([request_id + 5, 7, 9, 4, 5, 6, 7], 24, request_id=100 + request_id)
    compile_all(bench)
    bench.run_dry(10_000_000)
    assert bench.scheduler.num_preemptions > 0
    assert bench.board.wasted_tokens > 0
    for request_id in range(5):
        assert bench.received(request_id).token_ids == expected
        prompt = [request_id + 5, 7, 9, 4, 5, 6, 7]
        assert bench.received(100 + request_id).token_ids == expected_tokens(prompt, 24, VOCAB_SIZE)


def test_ambiguous_grammar_meets_the_same_limit_at_the_same_token_late_or_not(
    compiler: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "is_slow", True)
    monkeypatch.setattr(grammars, "_LIMITS", LLParserLimits(step_max_items=2000, verbose_errors=True))
    results = []
    for late_masks in (None, LateMasks(VOCAB_SIZE, lambda: None)):
        bench = new_bench(compiler, late_masks=late_masks)
        ask(bench, 0, AMBIGUOUS, max_tokens=150, sampling=Sampling(temperature=5.0, seed=3), min_tokens=150)
        compile_all(bench)
        bench.run_dry(10_000_000)
        failure = bench.received(0).failure
        assert failure is not None
        assert failure.code == FailureCode.BAD_GRAMMAR
        results.append((bench.received(0).token_ids, failure.text, bench.received(0).finishes))
    assert results[0] == results[1]
    assert "Too many items (limit 2000" in results[0][1]
    assert len(results[0][0]) > 3


def test_tokens_of_a_resumed_stream_are_taken_in_beside_the_loop(
    compiler: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_alone(compiler, DIGITS_AND_SPACES).received(0).token_ids
    threads: Counter[str] = Counter()
    advance = SequenceConstraints.advance

    def count(constraints: SequenceConstraints, *args: Any) -> None:
        threads[threading.current_thread().name] += 1
        advance(constraints, *args)

    monkeypatch.setattr(SequenceConstraints, "advance", count)
    monkeypatch.setattr(late_masks_module, "_SLICE_S", 0.0)  # each token is a slice
    bench = new_bench(compiler, late_masks=LateMasks(VOCAB_SIZE, lambda: None))
    num_given = len(whole) - 2
    for request_id in range(3):
        bench.submit(
            [*PROMPT, *whole[:num_given]],
            24,
            request_id=request_id,
            num_prompt_tokens=len(PROMPT),
            stop_ids=(EOS,),
            sampling=DRAWN,
            constraints=Constraints(grammar=DIGITS_AND_SPACES),
        )
    bench.run_dry(10_000_000)
    for request_id in range(3):
        assert bench.received(request_id).token_ids == whole[num_given:]
    assert threads["late masks"] >= 3 * num_given
    assert threads[threading.current_thread().name] <= 3 * 2


def test_resumed_stream_whose_tokens_its_grammar_forbids_fails_alone(compiler: GrammarCache) -> None:
    bench = new_bench(compiler, late_masks=LateMasks(VOCAB_SIZE, lambda: None))
    letter = tokens_of("x")
    for request_id, received_before in enumerate((letter, [])):
        bench.submit(
            PROMPT + received_before,
            30,
            request_id=request_id,
            num_prompt_tokens=len(PROMPT),
            stop_ids=(EOS,),
            constraints=Constraints(grammar=DIGITS_AND_SPACES),
        )
    compile_all(bench)
    bench.run_dry(10_000_000)
    received = bench.received(0)
    assert (received.token_ids, received.finishes) == ([], [Finish.FAILED])
    assert received.failure is not None
    assert received.failure.code == FailureCode.BAD_GRAMMAR
    assert bench.received(1).finishes == [Finish.STOP]


def test_mask_of_a_sequence_that_has_ended_is_not_filled() -> None:
    constraints = SequenceConstraints(Constraints(), None, frozenset(), VOCAB_SIZE, backlog=[5])
    late_masks = HeldLateMasks()
    assert not late_masks.is_ready(constraints, 1)
    late = constraints.late
    assert late is not None
    del constraints
    late_masks.released.set()
    assert late_masks.work_on(late)
    assert late.mask is None


class DoneAtSecondLook(LateMask):
    """The thread finishes between two looks at it."""

    num_looks = 0

    @property
    def is_done(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 1

    @is_done.setter
    def is_done(self, value: bool) -> None:
        pass


def test_late_mask_of_dropped_tokens_that_gets_done_meanwhile_is_not_used() -> None:
    constraints = SequenceConstraints(Constraints(), None, frozenset(), VOCAB_SIZE)
    constraints.late = DoneAtSecondLook(constraints, (), num_tokens=7)
    late_masks = LateMasks(VOCAB_SIZE, lambda: None)
    assert not late_masks.is_ready(constraints, 3)
    assert late_masks.is_ready(constraints, 3)
    assert constraints.late is None


def test_grammar_is_quick_again_after_enough_quick_masks() -> None:
    pace = Pace()
    pace.note(1000)
    assert not pace.is_slow
    pace.note(3_000_000)
    for _ in range(15):
        pace.note(1000)
    assert pace.is_slow
    pace.note(1000)
    assert not pace.is_slow


@given(st.lists(st.sampled_from([b"a", b"b", b"c", None]), max_size=40))
def test_tenants_take_turns_for_late_masks(events: list[bytes | None]) -> None:
    """Another tenant is at most one mask ahead while one waits; a tenant's own keep their order. None: one is done."""
    turns, waiting = MaskTurns(), list[LateMask]()
    done_since: dict[LateMask, Counter[bytes]] = {}
    for tenant in [*events, *[None] * len(events)]:
        if tenant is not None:
            late = LateMask(SequenceConstraints(Constraints(), None, frozenset(), 32, tenant=tenant), (), 0)
            turns.put(late)
            waiting.append(late)
            done_since[late] = Counter()
        elif (taken := turns.take()) is None:
            assert not waiting
        else:
            assert taken is next(late for late in waiting if late.tenant == taken.tenant)
            waiting.remove(taken)
            counts = done_since[taken]
            most = 1 + counts.pop(taken.tenant, 0)
            assert all(count <= most for count in counts.values())
            for late in waiting:
                done_since[late][taken.tenant] += 1
    assert not waiting


def test_mask_of_one_tenant_does_not_wait_for_all_of_another() -> None:
    done: list[bytes] = []
    begun, released, all_done = threading.Event(), threading.Event(), threading.Event()

    class Recorded(LateMasks):
        def work_on(self, late: LateMask) -> bool:
            begun.set()
            released.wait(60)
            done.append(late.tenant)
            if len(done) == 6:
                all_done.set()
            return super().work_on(late)

    late_masks = Recorded(VOCAB_SIZE, lambda: None)
    tenants = [b"flood"] * 5 + [b"other"]
    streams = [
        SequenceConstraints(Constraints(), None, frozenset(), VOCAB_SIZE, backlog=[5], tenant=tenant)
        for tenant in tenants
    ]
    for constraints in streams:
        assert not late_masks.is_ready(constraints, 1)
        assert begun.wait(60)  # the first is at work while the others come
    released.set()
    assert all_done.wait(60)
    assert done.index(b"other") <= 2


@pytest.mark.usefixtures("all_slow")
def test_equal_request_joins_a_sequence_whose_mask_is_late(compiler: GrammarCache) -> None:
    """It does, too, between the step that ran without the mask and the turn that learns of it."""
    late_masks = HeldLateMasks()
    bench = new_bench(compiler, capacity=1, late_masks=late_masks)
    ask(bench, 0, DIGITS_AND_SPACES, sampling=DRAWN, may_share=True)
    compile_all(bench)
    opened = bench.requests.table.find(1, 0)
    assert opened is not None
    sequence = opened.sequence
    while sequence.stopped_generation != sequence.generation:
        bench.engine.turn()
        bench.executor.run_one()
    for request_id in (1, 2):
        ask(bench, request_id, DIGITS_AND_SPACES, sampling=DRAWN, may_share=True)
    bench.engine.turn()
    late_masks.released.set()
    bench.run_dry(10_000_000)
    assert bench.board.requests_coalesced == 2
    assert bench.received(0).token_ids == bench.received(1).token_ids == bench.received(2).token_ids
