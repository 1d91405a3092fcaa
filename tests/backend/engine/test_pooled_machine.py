"""Any order of pooled requests, cancellations, deaths, failing steps and turns leaves each result exact."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from penstock.backend.engine.requests.vector_delivery import VectorCache
from penstock.shm.messages import Finish, PooledKind
from tests.backend.engine.machine import EngineRules
from tests.backend.harness import Bench, Received
from tests.fake_encoder import FakeEncoder, PoolingFakePass, fake_vectors

VOCAB, BAD = 97, 90


class FaultyEncoder(FakeEncoder):
    def forward(self, batch: Any) -> Any:
        if BAD in batch.input_ids:
            raise ArithmeticError("planted")
        return super().forward(batch)


class FaultyDecoder(PoolingFakePass):
    def forward(self, batch: Any) -> Any:
        if BAD in batch.input_ids:
            raise ArithmeticError("planted")
        return super().forward(batch)


Vectors = np.ndarray[Any, Any]


class PooledMachine(EngineRules[Vectors | None]):
    """Two tenants with groups of inputs; token BAD makes any step fail that it is in. A request whose step must fail
    expects None."""

    @initialize(
        is_encoder=st.booleans(),
        max_running=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        capacity=st.integers(0, 3),
        cache_bytes=st.sampled_from((0, 1200)),
    )
    def start(self, is_encoder: bool, max_running: int, max_batch_tokens: int, capacity: int, cache_bytes: int) -> None:
        self.kinds: tuple[PooledKind, ...] = ("embed", "classify")
        if is_encoder:
            self.kinds = (*self.kinds, "token_embed", "sparse")
        self.bench = Bench(
            num_pages=12,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
            forward_pass=FaultyEncoder(VOCAB) if is_encoder else FaultyDecoder(VOCAB, max_running),
            vector_cache=VectorCache(cache_bytes) if cache_bytes else None,
        )

    @rule(
        data=st.data(),
        tokens=st.lists(st.sampled_from((1, 2, 3, BAD)), min_size=1, max_size=7) | st.lists(st.just(4), min_size=1),
        group=st.integers(0, 2),
        options=st.fixed_dictionaries({"tenant": st.sampled_from((b"", b"t")), "normalize": st.booleans()}),
    )
    def submit(self, data: st.DataObject, tokens: list[int], group: int, options: dict[str, Any]) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        second_start = data.draw(st.integers(0, len(tokens) - 1))
        self.bench.submit_pooled(
            tokens, kind, second_start, request_id=self.next_id, frontend=self.frontend, group=group, **options
        )
        vectors = fake_vectors(tokens, kind, second_start, VOCAB).astype(np.float64)
        if options["normalize"]:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        self.expect(None if BAD in tokens else vectors[vectors != 0])

    @rule()
    def turn(self) -> None:
        self.bench.engine._num_failed_steps = 0  # each failure has its own cause
        super().turn()

    def check(self, received: Received, expected: Vectors | None) -> None:
        if expected is None:
            assert received.finishes == [Finish.FAILED]
        else:
            np.testing.assert_allclose(received.values, expected, rtol=1e-6)


TestPooledMachine = PooledMachine.TestCase
TestPooledMachine.settings = settings(max_examples=60, stateful_step_count=30)
