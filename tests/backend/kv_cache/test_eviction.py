"""Eviction takes idle pages of the tenant with the most for its weight, least recently held first."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool

WEIGHTS = {b"a": 1.0, b"b": 1.0, b"c": 4.0}


def add_idle(pool: PagePool, tenant: bytes, numbers: range) -> dict[int, bytes]:
    """Index one page per number and release it. Returns the pages with their hashes."""
    added = {}
    for number in numbers:
        (page,) = pool.allocate(1)
        page_hash = tenant + number.to_bytes(2)
        pool.index_page(page, page_hash, IndexedPage(page_hash, b"", tenant, tenant=tenant, weight=WEIGHTS[tenant]))
        pool.release([page])
        added[page] = page_hash
    return added


def count_cached(pool: PagePool, added: dict[int, bytes]) -> int:
    return sum(pool.find(page_hash) is not None for page_hash in added.values())


def test_one_tenants_flood_leaves_the_others_cached_pages() -> None:
    pool = PagePool(40)
    quiet = add_idle(pool, b"a", range(10))
    add_idle(pool, b"b", range(100))
    assert count_cached(pool, quiet) == 10
    weighty = add_idle(pool, b"c", range(40))
    assert count_cached(pool, weighty) >= 20
    assert count_cached(pool, quiet) >= 5


def test_pages_of_a_tenant_that_does_not_come_back_are_evicted_in_the_end() -> None:
    pool = PagePool(40)
    quiet = add_idle(pool, b"a", range(10))
    add_idle(pool, b"b", range(400))
    assert count_cached(pool, quiet) == 0
    assert pool.num_idle == 40


class EvictionMachine(RuleBasedStateMachine):
    """Against a model that counts: within an eighth, the tenant with the most idle pages for its weight gives one."""

    @initialize(num_pages=st.integers(1, 30))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.idle: dict[int, bytes] = {}
        """Page → tenant, least recently held first."""
        self.held: list[int] = []
        self.num_made = self.num_added = 0
        self.added_at: dict[int, int] = {}

    def note_idle(self, page: int, tenant: bytes) -> None:
        self.idle[page] = tenant
        self.added_at[page] = self.num_added
        self.num_added += 1

    @precondition(lambda self: self.pool.num_available)
    @rule(tenant=st.sampled_from(sorted(WEIGHTS)))
    def compute(self, tenant: bytes) -> None:
        counts = Counter(self.idle.values())
        has_free = self.pool.num_available > self.pool.num_idle
        (page,) = self.pool.allocate(1)
        if has_free:
            assert page not in self.idle
        else:
            self.judge_eviction(page, counts)
        self.num_made += 1
        page_hash = self.num_made.to_bytes(3)
        self.pool.index_page(page, page_hash, IndexedPage(page_hash, b"", b"", tenant=tenant, weight=WEIGHTS[tenant]))
        self.pool.release([page])
        self.note_idle(page, tenant)

    def judge_eviction(self, page: int, counts: Counter[bytes]) -> None:
        tenant = self.idle.pop(page)
        if self.added_at[page] >= self.num_added - 4 * self.pool.num_pages:
            most = max(count / WEIGHTS[other] for other, count in counts.items())
            assert counts[tenant] / WEIGHTS[tenant] * 1.125**2 >= most
        assert all(self.added_at[page] < self.added_at[other] for other in self.idle if self.idle[other] == tenant)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def find_again(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.idle)))
        tenant = self.idle.pop(page)
        self.pool.hold(page)
        self.pool.release([page])
        self.note_idle(page, tenant)

    @invariant()
    def it_is_sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.num_idle == len(self.idle)


TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = settings(max_examples=60, stateful_step_count=60)
