"""Requests whose result is a vector: whole inputs in steps, sharing, fairness; a fault stays with its request."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from penstock.backend.passes.fake import FakePass
from penstock.shm.messages import MAX_VECTOR_PART_BYTES, FailureCode, Finish, PooledKind
from tests.backend.harness import Bench, expected_tokens
from tests.fake_encoder import FakeEncoder, PoolingFakePass, fake_vectors

VOCAB = 97


def encoder_bench(**options: Any) -> Bench:
    return Bench(forward_pass=options.pop("forward_pass", None) or FakeEncoder(VOCAB), vocab_size=VOCAB, **options)


def assert_exact(bench: Bench, tokens: list[int], kind: str = "embed", second_start: int = 0, **key: Any) -> None:
    values = bench.received(**key).values
    np.testing.assert_array_equal(values, fake_vectors(tokens, kind, second_start, VOCAB).ravel())


@pytest.mark.parametrize("kind", ["embed", "token_embed", "classify", "token_classify"])
def test_each_request_receives_its_own_vector(kind: PooledKind) -> None:
    bench = encoder_bench(max_batch_tokens=12)
    inputs = [[number, *range(number % 6)] for number in range(40)]
    for number, tokens in enumerate(inputs):
        bench.submit_pooled(tokens, kind, number % len(tokens), request_id=number)
    bench.run_dry()
    for number, tokens in enumerate(inputs):
        assert_exact(bench, tokens, kind, number % len(tokens), request_id=number)
    assert bench.board.computed_tokens == sum(map(len, inputs))
    assert all(batch.page_table.shape == (batch.num_rows, 0) for batch in bench.executor.batches)


def test_sparse_vector_is_its_values_that_are_not_zero() -> None:
    bench = encoder_bench()
    bench.submit_pooled([1, 2, 3], "sparse")
    bench.run_dry()
    dense = np.zeros(VOCAB, np.float32)
    indices = np.frombuffer(b"".join(part.indices for part in bench.received().parts), np.int32)
    dense[indices] = bench.received().values
    np.testing.assert_array_equal(dense, fake_vectors([1, 2, 3], "sparse", 0, VOCAB)[0])
    assert 0 < len(indices) < VOCAB
    assert bench.received().values.all()


def test_long_vectors_come_in_parts_of_limited_size() -> None:
    class WidePass(FakeEncoder):
        def __init__(self, vocab_size: int) -> None:
            super().__init__(vocab_size)
            object.__setattr__(self.spec, "pooled", {"token_embed": 1 << 16, "sparse": 1 << 18})

        def forward(self, batch):  # type: ignore[no-untyped-def]
            shape = (5, 1 << 16) if batch.pooled.kinds == ("token_embed",) else (1 << 18,)
            return (np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape),)

    bench = encoder_bench(forward_pass=WidePass(VOCAB))
    bench.submit_pooled([1, 2, 3, 4, 5], "token_embed", request_id=0)
    bench.run_dry()
    bench.submit_pooled([1, 2, 3, 4, 5], "sparse", request_id=1)
    bench.run_dry()
    for request_id in (0, 1):
        received = bench.received(request_id)
        np.testing.assert_array_equal(received.values, np.arange(1, 1 + len(received.values)))
        assert len(received.parts) > 1
        assert all(len(part.values) + len(part.indices) <= MAX_VECTOR_PART_BYTES for part in received.parts)


def test_subscribers_of_one_computation_receive_it_in_their_own_form() -> None:
    bench = encoder_bench()
    forms = [(dimensions, normalize) for dimensions in (0, 3, 8) for normalize in (False, True)]
    for number, (dimensions, normalize) in enumerate(forms):
        bench.submit_pooled(
            [5, 6], request_id=number, frontend=number % 2, num_dimensions=dimensions, normalize=normalize
        )
    bench.run_dry()
    raw = fake_vectors([5, 6], "embed", 0, VOCAB)[0].astype(np.float64)
    for number, (dimensions, normalize) in enumerate(forms):
        expected = raw[: dimensions or None]
        if normalize:
            expected = expected / np.linalg.norm(expected)
        received = bench.received(number, number % 2)
        np.testing.assert_allclose(received.values, expected, rtol=1e-6)
        assert received.started is not None
        assert received.started.is_coalesced == (number > 0)
    assert bench.board.computed_tokens == 2
    assert bench.board.requests_coalesced == len(forms) - 1


@pytest.mark.parametrize("change", [{"kind": "classify"}, {"second_start": 1}, {"salt": b"other"}, {"tokens": [5, 7]}])
def test_inputs_that_differ_in_anything_are_computed_apart(change: dict[str, Any]) -> None:
    bench = encoder_bench()
    fields: dict[str, Any] = {"tokens": [5, 6], "kind": "embed", "second_start": 0}
    bench.submit_pooled(**fields)
    bench.submit_pooled(**(fields | change), request_id=1)
    bench.run_dry()
    assert bench.board.computed_tokens == 4
    assert not bench.board.requests_coalesced


def test_late_joiner_of_a_step_that_runs_receives_the_vector() -> None:
    bench = encoder_bench()
    bench.submit_pooled([5, 6])
    bench.engine.turn()
    assert bench.executor.num_planned == 1
    bench.executor.run_one()
    bench.submit_pooled([5, 6], request_id=1)
    bench.run_dry()
    assert_exact(bench, [5, 6], request_id=0)
    assert_exact(bench, [5, 6], request_id=1)
    assert bench.board.computed_tokens == 2


@pytest.mark.parametrize(
    ("options", "code", "limit"),
    [
        ({"kind": "embed", "num_dimensions": 9}, FailureCode.NOT_SERVED, 8),
        ({"kind": "classify", "num_dimensions": 1}, FailureCode.NOT_SERVED, 3),
        ({"tokens": list(range(90)) * 3}, FailureCode.CONTEXT_TOO_LONG, 256),
        ({"tokens": [1, VOCAB]}, FailureCode.BAD_TOKEN, VOCAB),
        ({"second_start": 2}, FailureCode.INTERNAL, 0),
        ({"num_prompt_tokens": 1}, FailureCode.INTERNAL, 0),
    ],
)
def test_request_that_cannot_be_served_is_refused(options: dict[str, Any], code: FailureCode, limit: int) -> None:
    bench = encoder_bench()
    bench.submit_pooled(**({"tokens": [1, 2]} | options))
    bench.run_dry()
    failure = bench.received().failure
    assert bench.received().finishes == [Finish.REJECTED]
    assert failure is not None
    assert (failure.code, failure.limit) == (code, limit)


def test_each_kind_of_pass_refuses_what_it_does_not_do() -> None:
    bench = encoder_bench()
    bench.submit([1, 2], 3)
    bench.run_dry()
    for kind in get_args(PooledKind):
        decoder = Bench(forward_pass=PoolingFakePass(VOCAB, 8))
        decoder.submit_pooled([1, 2], kind)
        decoder.run_dry()
        received = decoder.received() if kind not in ("embed", "classify") else bench.received()
        assert received.failure is not None
        assert received.failure.code == FailureCode.NOT_SERVED
    bench = Bench(forward_pass=FakePass(VOCAB, 8))
    bench.submit_pooled([1, 2])
    bench.run_dry()
    assert bench.received().finishes == [Finish.REJECTED]


def step_lengths(bench: Bench) -> list[list[int]]:
    return [np.diff(batch.query_starts).tolist() for batch in bench.executor.batches]


def test_steps_are_filled_with_whole_inputs_and_a_longer_one_has_its_own() -> None:
    bench = encoder_bench(max_batch_tokens=10, capacity=0)
    for number, length in enumerate([4, 4, 5, 2, 30, 3, 3]):
        bench.submit_pooled([number] * length, request_id=number)
    bench.run_dry()
    # 5 does not fit behind 4 + 4 and is passed by 2; it comes first in the next step. 30 is as long as three steps.
    assert step_lengths(bench) == [[4, 4, 2], [5, 3], [30], [3]]
    bench.close()


def test_long_input_waits_one_step_however_many_short_ones_come() -> None:
    bench = encoder_bench(max_batch_tokens=10, capacity=0)
    number = 1
    bench.submit_pooled([1, 2], request_id=number)
    bench.submit_pooled([3] * 10, request_id=0)
    for _ in range(4):
        for _ in range(8):
            number += 1
            bench.submit_pooled([number % VOCAB, number // VOCAB], request_id=number)
        bench.turn()
    assert_exact(bench, [3] * 10)
    bench.run_dry()


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_requests_of_a_tenant_take_turns_however_many_inputs_one_has(kind: str) -> None:
    """A later request with one input waits for few of the 300 of an earlier one, and one with 20 for about 20."""
    forward_pass = FakeEncoder(VOCAB) if kind == "encoder" else PoolingFakePass(VOCAB, 8)
    bench = Bench(forward_pass=forward_pass, max_batch_tokens=16, max_running=8)
    for number in range(300):
        bench.submit_pooled([1, number % 90, number // 90, 9], request_id=number, group=7)
    for _ in range(3):
        bench.turn()
    for number in range(1000, 1020):
        bench.submit_pooled([2, number % 90, number // 90, 9], request_id=number, group=8)
    bench.submit_pooled([3, 3, 3, 3], request_id=2000)

    def turns_until(*request_ids: int) -> int:
        for turn in range(200):
            if all(bench.received(number).finishes for number in request_ids):
                return turn
            bench.turn()
        raise AssertionError("never done")

    assert turns_until(2000) <= 4
    assert turns_until(*range(1000, 1020)) <= 16
    assert bench.scheduler.num_waiting > 150
    bench.run_dry()


def test_tenants_share_the_device_by_tokens() -> None:
    bench = encoder_bench(max_batch_tokens=16, max_waiting=10000)
    for number in range(200):
        bench.submit_pooled([number % 90, number // 90, 1, 1], request_id=number, tenant=b"a")
        bench.submit_pooled([number % 90, number // 90] + [2] * 10, request_id=1000 + number, tenant=b"b")
    for _ in range(100):
        bench.turn()
    tokens = {b"a": 0, b"b": 0}
    for (_, request_id), received in bench.link.received.items():
        if received.finishes:
            tokens[b"a" if request_id < 1000 else b"b"] += 4 if request_id < 1000 else 12
    assert tokens[b"a"] == pytest.approx(tokens[b"b"], rel=0.1)
    bench.run_dry()


class FaultyEncoder(FakeEncoder):
    """Raises for token 90; for token 91 a value is not finite, for token 92 the vector is too short."""

    def forward(self, batch):  # type: ignore[no-untyped-def]
        if 90 in batch.input_ids:
            raise ArithmeticError("planted")
        vectors = list(super().forward(batch))
        for index, row in enumerate(batch.pooled.rows):
            tokens = batch.input_ids[batch.query_starts[row] : batch.query_starts[row + 1]]
            if 91 in tokens:
                vectors[index][-1] = np.inf
            if 92 in tokens:
                vectors[index] = vectors[index][:-1]
        return tuple(vectors)


@pytest.mark.parametrize("bad", [90, 91, 92])
@pytest.mark.parametrize("kind", ["embed", "token_embed", "sparse"])
def test_fault_fails_the_request_that_causes_it_and_no_other(bad: int, kind: PooledKind) -> None:
    bench = encoder_bench(forward_pass=FaultyEncoder(VOCAB), max_batch_tokens=64)
    for number in range(8):
        bench.submit_pooled([number, 1], kind, request_id=number)
    bench.submit_pooled([bad, 1], kind, request_id=8)
    for number in range(9, 15):
        bench.submit_pooled([number, 1], kind, request_id=number)
    bench.run_dry()
    assert bench.received(8).finishes == [Finish.FAILED]
    assert bench.board.requests_failed == 1
    for number in [*range(8), *range(9, 15)]:
        values = fake_vectors([number, 1], kind, 0, VOCAB)
        np.testing.assert_array_equal(bench.received(number).values, values[values != 0])


def test_cancelled_or_expired_request_is_dropped_before_its_step() -> None:
    bench = encoder_bench(max_batch_tokens=4)
    for number in range(4):
        bench.submit_pooled([number, 1], request_id=number, timeout_ms=1000 if number == 3 else 0)
    bench.engine.turn()  # 0 and 1 are planned, and 2 and 3 behind them
    bench.cancel(0)
    bench.cancel(2)
    bench.now_s = 2.0
    bench.engine.turn()
    bench.run_dry()
    assert bench.board.computed_tokens == 2
    assert_exact(bench, [1, 1], request_id=1)
    assert bench.received(3).finishes == [Finish.EXPIRED]
    assert not bench.received(0).finishes
    assert not bench.received(2).parts


def test_drain_refuses_new_requests_and_ends_open_ones() -> None:
    bench = encoder_bench()
    bench.submit_pooled([1, 2])
    bench.turn()
    bench.engine.drain(10.0)
    bench.submit_pooled([3], request_id=1)
    bench.run_dry()
    assert_exact(bench, [1, 2])
    failure = bench.received(1).failure
    assert failure is not None
    assert failure.code == FailureCode.SHUTTING_DOWN


def test_request_of_an_earlier_backend_is_computed_here() -> None:
    bench = encoder_bench(max_waiting=1)
    for number in range(20):
        bench.submit_pooled([number, 1], request_id=number, admitted_ns=1 + number)
    bench.run_dry()
    for number in range(20):
        assert_exact(bench, [number, 1], request_id=number)


def test_full_wait_queue_refuses() -> None:
    bench = encoder_bench(max_waiting=4, max_running=2)
    for number in range(20):
        bench.submit_pooled([number, 1], request_id=number)
    bench.run_dry()
    refused = [bench.received(number).failure for number in range(20) if bench.received(number).failure]
    assert len(refused) == 20 - 4 - 2
    assert {failure.code for failure in refused if failure} == {FailureCode.OVERLOADED}


def test_decoder_pools_and_generates_in_the_same_steps() -> None:
    bench = Bench(forward_pass=PoolingFakePass(VOCAB, 8), num_pages=128, max_batch_tokens=8)
    prefix = list(range(20))
    for number in range(12):
        bench.submit_pooled([*prefix, number], "embed" if number % 2 else "classify", number % 3, request_id=number)
        bench.submit([*prefix, number], 5, request_id=100 + number)
    bench.run_dry()
    for number in range(12):
        kind = "embed" if number % 2 else "classify"
        assert_exact(bench, [*prefix, number], kind, number % 3, request_id=number)
        assert bench.received(100 + number).token_ids == expected_tokens([*prefix, number], 5, VOCAB)
    assert bench.board.cached_tokens > 12 * 16
    assert bench.pool.num_held == 0


def test_input_as_long_as_the_cache_is_pooled_although_nothing_could_be_generated() -> None:
    bench = Bench(forward_pass=PoolingFakePass(VOCAB, 8), num_pages=5, page_size=4)
    bench.submit_pooled(list(range(20)))
    bench.run_dry()
    assert_exact(bench, list(range(20)))


def test_no_plan_is_due_while_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = encoder_bench()
    bench.submit_pooled([1, 2, 3], request_id=0)
    bench.engine.turn()
    monkeypatch.setattr("penstock.backend.engine.steps.step_timing.StepTiming.spare_s", lambda *_: 1.0)
    bench.engine.turn()
    assert bench.engine.plan_due_s is None
    bench.submit_pooled([4, 5, 6], request_id=1)
    bench.engine.turn()
    assert bench.engine.plan_due_s == 1.0
