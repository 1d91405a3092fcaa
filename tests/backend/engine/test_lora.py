"""Adapters of rows, through the whole engine, with a pass whose tokens depend on the adapter of each row."""

from __future__ import annotations

import pytest

from penstock.backend.engine.steps.batch_builder import keep_rows
from penstock.backend.forward_pass import NO_ADAPTER
from penstock.backend.passes.fake import FakePass
from penstock.backend.scheduling.step_plan import Plan
from penstock.shm.messages import FailureCode, Finish, PromptHeader
from tests.backend.harness import Bench
from tests.fake_passes import next_token

VOCAB_SIZE = 97
ADAPTERS = {"": NO_ADAPTER, "adapter-0": 0, "adapter-1": 1}


def make_bench(num_pages: int = 64) -> Bench:
    page_bytes = 8 * 4
    return Bench(
        num_pages=num_pages, vocab_size=VOCAB_SIZE, forward_pass=FakePass(VOCAB_SIZE, 8, 8 * page_bytes, num_adapters=2)
    )


def expected(prompt: list[int], count: int, adapter: str) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB_SIZE, adapter=ADAPTERS[adapter]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_pages", [64, 14])
def test_equal_prompts_with_other_adapters_share_neither_sequences_nor_pages(num_pages: int) -> None:
    """With few pages the sequences are preempted and resumed."""
    bench = make_bench(num_pages)
    prompt = [7, 3, 9, 1, 4, 4, 8, 2, 6]
    assert len({tuple(expected(prompt, 20, adapter)) for adapter in ADAPTERS}) == 3
    for request_id, adapter in enumerate(2 * list(ADAPTERS)):
        bench.submit(prompt, 20, request_id=request_id, may_share=True, adapter=adapter)
    bench.run_dry()
    for request_id, adapter in enumerate(2 * list(ADAPTERS)):
        received = bench.received(request_id)
        assert received.token_ids == expected(prompt, 20, adapter)
        assert received.started is not None
        assert received.started.is_coalesced == (request_id >= 3)
    assert any(bench.received(request_id).num_preemptions for request_id in range(6)) == (num_pages == 14)
    bench.submit(prompt, 4, request_id=9, adapter="adapter-1")
    bench.run_dry()
    assert bench.received(9).token_ids == expected(prompt, 4, "adapter-1")
    again = bench.received(9).started
    assert again is not None
    assert again.cached_tokens == 8 or num_pages == 14
    bench.close()


def test_stream_that_another_backend_began_continues_with_its_adapter() -> None:
    bench = make_bench()
    prompt = [5, 6, 7, 8, 9]
    generated = expected(prompt, 10, "adapter-0")
    bench.submit(prompt + generated[:6], 10, num_prompt_tokens=5, admitted_ns=1, adapter="adapter-0")
    bench.now_s = 10.0  # it waits for others of its group
    bench.turn()
    bench.now_s = 20.0
    bench.run_dry()
    assert bench.received().token_ids == generated[6:]
    bench.close()


def test_unknown_adapter_is_refused_before_anything_runs() -> None:
    bench = make_bench()
    bench.submit([1, 2, 3], request_id=1, adapter="adapter-2")
    bench.run_dry()
    failure = bench.received(1).failure
    assert failure is not None
    assert failure.code == FailureCode.NO_ADAPTER
    assert bench.received(1).finishes == [Finish.REJECTED]
    assert not bench.executor.batches
    bench.close()


def test_batch_names_adapters_only_where_a_row_has_one() -> None:
    bench = make_bench()
    bench.submit([1, 2, 3], 6, request_id=1)
    bench.turn()
    bench.submit([4, 5], 2, request_id=2, adapter="adapter-1")
    bench.run_dry()
    adapters = [batch.adapters for batch in bench.executor.batches]
    assert adapters[0] is None
    assert adapters[-1] is None
    assert [-1, 1] in [column.tolist() for column in adapters if column is not None]
    bench.close()


def test_rows_that_are_dropped_take_their_adapters_along() -> None:
    bench = make_bench()
    for request_id, adapter in enumerate(("adapter-1", "", "adapter-0")):
        bench.submit([1 + request_id], 6, request_id=request_id, adapter=adapter)
    bench.turn()
    batch, plan = bench.executor.batches[0], Plan()
    assert batch.adapters is not None
    assert batch.adapters.tolist() == [1, NO_ADAPTER, 0]
    kept = keep_rows(batch, [0, 2], plan).adapters
    assert kept is not None
    assert kept.tolist() == [1, 0]
    assert keep_rows(batch, [1], plan).adapters is None
    bench.run_dry()
    bench.close()


def test_own_salt_keeps_tenants_and_adapters_apart() -> None:
    salts = {
        PromptHeader(request_id=0, tokens=bytes(4), num_prompt_tokens=1, salt=salt, adapter=adapter).own_salt
        for salt in (b"", b"tenant", b"adapter")
        for adapter in ("", "a", "b")
    }
    assert len(salts) == 9
    assert PromptHeader(request_id=0, tokens=bytes(4), num_prompt_tokens=1, salt=b"tenant").own_salt == b"tenant"
