"""Vectors on their way to subscribers: each ends once whatever fails, finished ones are kept, refusals are revoked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backend.engine.requests.vector_delivery import VectorCache
from penstock.backend.engine.steps import vectors as vectors_module
from penstock.backend.engine.steps.vectors import Vectors
from penstock.shm.messages import Finish, Pooled
from tests.backend.engine.test_pooled_requests import VOCAB, assert_exact, encoder_bench
from tests.fake_encoder import fake_vectors


def test_error_at_delivery_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = encoder_bench(max_batch_tokens=64)
    for number in range(4):
        bench.submit_pooled([number, 1], request_id=number, normalize=number == 2)
    with monkeypatch.context() as planted:
        planted.setattr("penstock.backend.engine.steps.vectors._normalized", lambda _matrix: 1 / 0)
        bench.run_dry()
    assert [bench.received(number).finishes for number in range(4)] == [
        [Finish.STOP],
        [Finish.STOP],
        [Finish.FAILED],
        [Finish.STOP],
    ]


def test_error_in_one_form_of_a_vector_leaves_its_other_forms_and_their_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four requests are packed together, one of them shares its sequence with one in another form."""
    bench = encoder_bench(max_batch_tokens=64)
    for number in range(4):
        bench.submit_pooled([number, 1], request_id=number)
    bench.submit_pooled([2, 1], request_id=4, normalize=True)
    bad = fake_vectors([2, 1], "embed", 0, VOCAB)

    def pack_dense(vectors: list[Vectors], pooled: Pooled) -> list[bytes]:
        if not pooled.normalize and any((each.values == bad).all() for each in vectors):
            raise ArithmeticError("planted")
        return vectors_module.pack_dense(vectors, pooled)

    monkeypatch.setattr("penstock.backend.engine.requests.vector_delivery.pack_dense", pack_dense)
    bench.run_dry()
    for number in (0, 1, 3):
        assert_exact(bench, [number, 1], request_id=number)
    assert [bench.received(number).finishes for number in range(5)] == [
        [Finish.FAILED if number == 2 else Finish.STOP] for number in range(5)
    ]
    assert (bench.board.requests_finished, bench.board.requests_failed) == (4, 1)


def test_error_while_one_vector_is_sent_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = encoder_bench(max_batch_tokens=64)
    for number in range(4):
        bench.submit_pooled([number, 1], request_id=number)
    push = bench.link.push_vectors

    def push_vectors(frontend: int, request_id: int, *rest: Any) -> None:
        if request_id == 2:
            raise ArithmeticError("planted")
        push(frontend, request_id, *rest)

    monkeypatch.setattr(bench.link, "push_vectors", push_vectors)
    bench.run_dry()
    assert [bench.received(number).finishes for number in range(4)] == [
        [Finish.FAILED if number == 2 else Finish.STOP] for number in range(4)
    ]


def test_frontend_that_was_refused_learns_once_that_there_is_room() -> None:
    bench = encoder_bench(max_waiting=2, max_running=1)
    for number in range(12):
        bench.submit_pooled([number], request_id=number, frontend=1 + number % 2)
        if number < 4:  # the device has as many steps as it takes
            bench.engine.turn()
    bench.engine.turn()
    refused = [key for key, received in bench.link.received.items() if received.finishes == [Finish.REJECTED]]
    assert refused
    assert not bench.link.announced
    bench.run_dry()
    assert bench.link.announced == sorted({frontend for frontend, _ in refused})
    bench.submit_pooled([90], request_id=90)
    bench.run_dry()
    assert len(bench.link.announced) == len({frontend for frontend, _ in refused})


def test_input_that_may_not_share_is_computed_anew() -> None:
    bench = encoder_bench(vector_cache=VectorCache(1 << 20))
    for request_id in range(2):
        bench.submit_pooled([5, 6], request_id=request_id, may_share=False)
    bench.run_dry()
    bench.submit_pooled([5, 6], request_id=2, may_share=False)
    bench.run_dry()
    assert bench.board.computed_tokens == 6
    assert not bench.board.requests_coalesced


def test_cached_vector_is_not_computed_again_and_has_the_form_of_its_request() -> None:
    bench = encoder_bench(vector_cache=VectorCache(1 << 20))
    for number, kind in enumerate(("embed", "token_embed", "sparse")):
        bench.submit_pooled([5, 6], kind, request_id=number)
    bench.run_dry()
    num_computed = bench.board.computed_tokens
    for number, kind in enumerate(("embed", "token_embed", "sparse")):
        bench.submit_pooled([5, 6], kind, request_id=10 + number)
        bench.turn()
        np.testing.assert_array_equal(bench.received(10 + number).values, bench.received(number).values)
        started = bench.received(10 + number).started
        assert started is not None
        assert (started.cached_tokens, started.is_coalesced) == (2, False)
    bench.submit_pooled([5, 6], request_id=20, num_dimensions=3, normalize=True)
    bench.run_dry()
    raw = fake_vectors([5, 6], "embed", 0, VOCAB)[0, :3].astype(np.float64)
    np.testing.assert_allclose(bench.received(20).values, raw / np.linalg.norm(raw), rtol=1e-6)
    assert bench.board.computed_tokens == num_computed
    assert (bench.board.vector_cache_hits, bench.board.vector_cache_misses) == (4, 3)
    for number, change in enumerate(({"salt": b"other"}, {"second_start": 1}, {"may_share": False})):
        bench.submit_pooled([5, 6], request_id=30 + number, **change)
    bench.run_dry()
    assert bench.board.computed_tokens == num_computed + 6


def test_cache_keeps_the_latest_used_vectors_within_its_bytes() -> None:
    cache = VectorCache(3 * (512 + 8))
    pooled = Pooled("embed")
    keys = [cache.key(b"", pooled, bytes([number])) for number in range(5)]
    for key in keys[:3]:
        cache.put(key, Vectors(np.zeros((1, 2), np.float32)))
    assert cache.get(keys[0]) is not None
    cache.put(keys[3], Vectors(np.zeros((1, 2), np.float32)))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True, False]
    cache.put(keys[4], Vectors(np.zeros((1, 200), np.float32)))  # evicts several
    assert [cache.get(key) is not None for key in keys] == [False, False, False, False, True]
    assert cache.num_bytes == 512 + 800
    cache.put(keys[0], Vectors(np.zeros((1, 4096), np.float32)))  # larger than the whole cache
    assert cache.get(keys[0]) is None
    assert cache.get(keys[4]) is not None
