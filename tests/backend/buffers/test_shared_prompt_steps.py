"""Prompts of embeddings on the test bench, step by step: preemption, restored pages, dropped rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from penstock.backend.buffers import SharedPromptRows
from penstock.backend.engine.steps.batch_builder import keep_rows
from penstock.backend.forward_pass import FROM_EMBEDDINGS, EmbeddedTokens, StepBatch
from penstock.backend.scheduling.step_plan import Plan
from tests.backend.buffers.embedded_prompts import StubLoan, fakes_tokens, random_rows, submit_embedded
from tests.backend.harness import Bench, expected_tokens
from tests.backend.passes.decoder.driver import RowsOnHost


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.close()


def test_preempted_sequence_reuses_its_pages_and_reads_no_embedding_twice(bench: Bench) -> None:
    rows = random_rows(26)
    loan = submit_embedded(bench, rows)
    while len(bench.received().token_ids) < 2:
        bench.turn()
    ((sequence, _),) = bench.requests.table.of_frontend(1)
    bench.scheduler._preemption.preempt(sequence)
    bench.run_dry()
    assert bench.received().token_ids == fakes_tokens(rows, 8, bench.vocab_size)
    assert loan.num_reads == Counter(range(26))


def test_preempted_sequence_without_its_pages_reads_its_embeddings_again() -> None:
    bench = Bench(num_pages=12)
    rows = random_rows(20)
    bench.submit([1, 2, 3, 4], 36, request_id=9)
    loan = submit_embedded(bench, rows, max_tokens=24)
    bench.run_dry()
    assert bench.received().num_preemptions > 0
    assert bench.received().token_ids == fakes_tokens(rows, 24, bench.vocab_size)
    assert bench.received(9).token_ids == expected_tokens([1, 2, 3, 4], 36, bench.vocab_size)
    assert max(loan.num_reads.values()) > 1
    bench.close()


@pytest.mark.parametrize("num_host_pages", [0, 16])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_pages_of_embeddings_are_discarded_with_their_sequence(num_host_pages: int, *, is_cancelled: bool) -> None:
    bench = Bench(num_pages=12, num_host_pages=num_host_pages)
    rows = random_rows(20)
    bench.submit([1, 2, 3, 4], 36, request_id=9)
    loan = submit_embedded(bench, rows, max_tokens=24)
    if is_cancelled:
        while not bench.received().num_preemptions or bench.board.host_pages_used < min(1, num_host_pages):
            bench.turn()
        bench.cancel()
    bench.run_dry()
    found = bench.received().token_ids
    assert found == fakes_tokens(rows, 24, bench.vocab_size)[: len(found)]
    assert bench.received().num_preemptions > 0
    if not is_cancelled:
        assert (max(loan.num_reads.values()) > 1) == (num_host_pages == 0), "computed again, or else restored"
    assert bench.board.host_pages_used == 0
    num_saved = bench.board.pages_saved
    assert (num_saved > 0) == (num_host_pages > 0)
    for number in range(3):  # these requests need all pages
        bench.submit([number, *range(9, 30)], 24, request_id=20 + number)
        bench.run_dry()
    assert bench.board.pages_saved == num_saved
    bench.close()


@pytest.mark.parametrize("cancelled", [0, 1, 2])
@pytest.mark.parametrize("turns", range(6))
def test_dropping_a_row_keeps_the_embeddings_of_the_others_in_place(bench: Bench, cancelled: int, turns: int) -> None:
    prompts = [random_rows(length, length) for length in (9, 5, 14)]
    bench.submit([1, 2, 3], 20, request_id=9)
    for number, rows in enumerate(prompts):
        submit_embedded(bench, rows, number)
    for _ in range(turns):
        bench.turn()
    bench.cancel(cancelled)
    bench.engine.turn()  # before the planned step begins
    bench.run_dry()
    for number, rows in enumerate(prompts):
        tokens = fakes_tokens(rows, 8, bench.vocab_size)
        found = bench.received(number).token_ids
        assert found == (tokens[: len(found)] if number == cancelled else tokens)
    assert bench.received(9).token_ids == expected_tokens([1, 2, 3], 20, bench.vocab_size)


def test_kept_rows_keep_their_embeddings_at_new_positions() -> None:
    x = FROM_EMBEDDINGS
    given = {1: random_rows(1, 1), 2: random_rows(2, 2), 7: random_rows(3, 3)}
    batch = StepBatch(
        input_ids=np.array([5, x, x, x, 6, 7, 8, x, x, x], np.int32),
        query_starts=np.array([0, 1, 2, 5, 7, 10], np.int32),
        context_lens=np.zeros(5, np.int32),
        page_table=np.zeros((5, 1), np.int32),
        slots=np.arange(5, dtype=np.int32),
        logit_rows=np.arange(5, dtype=np.int32),
        embeddings=tuple(EmbeddedTokens(first, RowsOnHost(rows)) for first, rows in given.items()),
    )
    for number in range(1, 32):
        kept = [row for row in range(5) if number >> row & 1]
        left = keep_rows(batch, kept, Plan())
        places = [place for part in left.embeddings for place in range(part.first, part.first + part.values.num_rows)]
        assert np.flatnonzero(left.input_ids == x).tolist() == places
        expected = [given[first] for first, row in ((1, 1), (2, 2), (7, 4)) if row in kept]
        for part, rows in zip(left.embeddings, expected, strict=True):
            np.testing.assert_array_equal(part.values.read(), rows)


def test_prompt_rows_begin_at_the_chunks_start() -> None:
    rows = random_rows(7)
    part = SharedPromptRows(StubLoan(rows), 2, 4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(part.read(), rows[2:6])
    assert not part.device_reads
