"""Host offload against a model of plain lists, and the work it saves an engine that is short of pages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.backend.engine.steps.batch_builder import BatchBuilder
from penstock.backend.forward_pass import StepBatch
from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.scheduling.step_plan import Plan
from penstock.shm.messages import Finish
from tests.backend.harness import Bench, expected_tokens
from tests.backend.kv_cache.test_page_pool import SALTS, salt_of

KEYS = [bytes([number]) * 16 for number in range(9)]


class HostOffloadMachine(RuleBasedStateMachine):
    """A page's number is its hash's first byte, so the test can check that a restore reads the right content."""

    @initialize(num_host_pages=st.integers(0, 5))
    def start(self, num_host_pages: int) -> None:
        self.host_offload = HostOffload(num_host_pages)
        self.num_host_pages = num_host_pages
        self.kept: list[bytes] = []
        """Least recently used first."""
        self.restored: set[bytes] = set()
        self.content: dict[int, int] = {}
        """Host page → content, once its save has been copied."""

    @rule(key=st.sampled_from(KEYS))
    def save(self, key: bytes) -> None:
        if key not in self.kept and len(self.kept) == self.num_host_pages:
            if not self.kept or self.kept[0] in self.restored:
                self.host_offload.save(key[0], key, salt_of(key))
                assert not self.host_offload.contains(key)
                return
            del self.kept[0]
        self.host_offload.save(key[0], key, salt_of(key))
        self.kept = [kept for kept in self.kept if kept != key] + [key]

    @rule(key=st.sampled_from(KEYS))
    def restore(self, key: bytes) -> None:
        if key not in self.kept:
            with pytest.raises(KeyError):
                self.host_offload.restore(key)
            return
        self.copy()
        assert self.content[self.host_offload.restore(key)] == key[0]
        self.host_offload.discard([key])  # without effect until the plan is made
        self.kept.remove(key)
        self.kept.append(key)
        self.restored.add(key)

    @rule()
    def end_plan(self) -> None:
        self.host_offload.end_plan()
        self.restored.clear()

    @rule()
    def copy(self) -> None:
        saves = self.host_offload.take_saves()
        assert len({host_page for _, host_page in saves}) == len(saves)
        self.content |= {host_page: page for page, host_page in saves}
        assert self.host_offload.take_saves() == ()

    @rule(salt=st.sampled_from(SALTS))
    def invalidate_tenant(self, salt: bytes) -> None:
        self.end_plan()  # no tenant is invalidated in the middle of a plan
        self.host_offload.invalidate_tenant(salt)
        self.kept = [kept for kept in self.kept if salt_of(kept) != salt]

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def discard(self, keys: list[bytes]) -> None:
        self.host_offload.discard(keys)
        self.kept = [kept for kept in self.kept if kept not in keys or kept in self.restored]

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        if not hasattr(self, "host_offload"):
            return
        assert self.host_offload.num_used == len(self.kept)
        assert [key for key in KEYS if self.host_offload.contains(key)] == sorted(self.kept)
        if not self.restored:
            self.host_offload.check_integrity()


TestHostOffloadMachine = HostOffloadMachine.TestCase
TestHostOffloadMachine.settings = settings(max_examples=60, stateful_step_count=40)

FIRST, SECOND = [7, 1, 4, 9, 2, 2, 8, 5], [3, 6, 6, 1, 8, 0, 5, 2]


def run_short_of_pages(num_host_pages: int, capacity: int) -> Bench:
    """Two sequences that do not fit together: one is preempted, and its pages go to the other."""
    bench = Bench(num_pages=10, page_size=4, num_host_pages=num_host_pages, capacity=capacity)
    bench.submit(FIRST, 24, request_id=1)
    bench.submit(SECOND, 24, request_id=2)
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens(FIRST, 24, bench.vocab_size)
    assert bench.received(2).token_ids == expected_tokens(SECOND, 24, bench.vocab_size)
    assert bench.board.preemptions > 0
    return bench


@pytest.mark.parametrize("capacity", [0, 1, 4])
def test_preempted_sequence_restores_its_pages_instead_of_computing_them_again(capacity: int) -> None:
    """Pages that applied steps have filled are kept, however many plans are in flight."""
    recomputed, restored = run_short_of_pages(0, capacity), run_short_of_pages(16, capacity)
    assert recomputed.board.pages_saved == recomputed.board.pages_restored == 0
    num_back = restored.board.pages_restored
    assert restored.board.pages_saved >= num_back > 0
    assert restored.board.computed_tokens <= recomputed.board.computed_tokens - 4 * num_back
    assert restored.board.host_pages_used == restored.board.pages_saved


def test_saves_of_a_step_that_cannot_be_built_run_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(num_pages=6, page_size=4, num_host_pages=16)
    for number in range(2):
        bench.submit([*FIRST, number], 2, request_id=number)
        bench.run_dry()
    build = BatchBuilder.build
    faults = iter([True])

    def fail_with_saves(builder: BatchBuilder, plan: Plan) -> StepBatch:
        if bench.board.pages_saved < bench.pool.host_offload.num_saved and next(faults, False):
            raise RuntimeError("planted")
        return build(builder, plan)

    monkeypatch.setattr(BatchBuilder, "build", fail_with_saves)
    for number in range(2, 5):  # these requests need all pages
        bench.submit([*SECOND, number], 12, request_id=number)
        bench.run_dry()
    assert next(faults, None) is None
    assert [bench.received(number).finishes for number in range(2, 5)].count([Finish.FAILED]) == 1
    bench.submit([*FIRST, 9], 2, request_id=9)
    bench.run_dry()
    assert bench.board.pages_restored == 2
    assert bench.received(9).token_ids == expected_tokens([*FIRST, 9], 2, bench.vocab_size)


def test_pages_used_once_are_not_saved() -> None:
    bench = Bench(num_pages=6, page_size=4, num_host_pages=16)
    for number in range(5):
        bench.submit([number, *FIRST], 6, request_id=number)
        bench.run_dry()
    assert bench.board.preemptions == bench.board.pages_saved == 0


def test_prefix_that_was_reused_survives_eviction_on_the_host() -> None:
    bench = Bench(num_pages=6, page_size=4, num_host_pages=16)
    for number in range(2):
        bench.submit([*FIRST, number], 2, request_id=number)
        bench.run_dry()
    for number in range(2, 4):  # these requests need all pages
        bench.submit([*SECOND, number], 12, request_id=number)
        bench.run_dry()
    assert bench.board.pages_saved >= 2
    bench.submit([*FIRST, 9], 2, request_id=9)
    bench.run_dry()
    assert bench.received(9).token_ids == expected_tokens([*FIRST, 9], 2, bench.vocab_size)
    started = bench.received(9).started
    assert started is not None
    assert started.cached_tokens == len(FIRST)
    assert bench.board.pages_restored == 2


def test_other_tenants_find_nothing_on_the_host() -> None:
    bench = Bench(num_pages=6, page_size=4, num_host_pages=16)
    for number in range(2):
        bench.submit([*FIRST, number], 2, request_id=number, salt=b"one")
        bench.run_dry()
    for number in range(2, 4):
        bench.submit([*SECOND, number], 12, request_id=number)
        bench.run_dry()
    assert bench.board.pages_saved >= 2
    bench.submit([*FIRST, 9], 2, request_id=9, salt=b"other")
    bench.run_dry()
    assert bench.board.pages_restored == 0
