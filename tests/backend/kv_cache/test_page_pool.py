"""The page pool against a model of plain dicts: allocate, index, find, share and release pages in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool

KEYS = [bytes([number]) * 16 for number in range(12)]
SALTS = (b"", b"other")


def parent_of(key: bytes) -> bytes:
    """Parent hash; several pages have the same one."""
    return KEYS[key[0] % 3]


def salt_of(key: bytes) -> bytes:
    return SALTS[key[0] % 2]


class PagePoolMachine(RuleBasedStateMachine):
    """Holdings stand for sequences: lists of pages, each released as a whole."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.num_pages = num_pages
        self.holdings: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}
        self.idle: list[int] = []
        """Least recently released first."""

    def held(self) -> set[int]:
        return {page for holding in self.holdings for page in holding}

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        free = self.num_pages - len(self.held()) - len(self.idle)
        if count > free + len(self.idle):
            before = (self.pool.num_available, self.pool.num_idle)
            with pytest.raises(MemoryError):
                self.pool.allocate(count)
            assert (self.pool.num_available, self.pool.num_idle) == before
            return
        evicted, self.idle = self.idle[: max(0, count - free)], self.idle[max(0, count - free) :]
        for page in evicted:
            del self.key_of[page]
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not self.held() & set(pages)
        assert not set(pages) & set(self.idle)
        self.holdings.append(pages)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def index_page(self, data: st.DataObject, key: bytes) -> None:
        holding = data.draw(st.sampled_from(self.holdings))
        if not holding:
            return
        page = data.draw(st.sampled_from(holding))
        self.pool.index_page(page, key, IndexedPage(key, parent_of(key), salt_of(key)))
        if page not in self.key_of and key not in self.key_of.values():
            self.key_of[page] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def find_and_hold(self, keys: list[bytes]) -> None:
        pages = [page for key in keys if (page := self.pool.find(key)) is not None]
        assert pages == [page for key in keys for page, known in self.key_of.items() if known == key]
        for page in pages:
            assert self.pool.is_idle(page) == (page in self.idle)
            self.pool.hold(page)
            if page in self.idle:
                self.idle.remove(page)
        self.holdings.append(pages)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holding = data.draw(st.sampled_from(self.holdings))
        self.holdings = [other for other in self.holdings if other is not holding]
        self.pool.release(holding)
        still_held = self.held()
        self.idle += [page for page in reversed(holding) if page in self.key_of and page not in still_held]

    @rule(salt=st.sampled_from(SALTS))
    def invalidate_tenant(self, salt: bytes) -> None:
        self.pool.invalidate_tenant(salt)
        self.key_of = {page: key for page, key in self.key_of.items() if salt_of(key) != salt}
        self.idle = [page for page in self.idle if page in self.key_of]

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def discard(self, keys: list[bytes]) -> None:
        self.pool.discard(keys)
        self.key_of = {page: key for page, key in self.key_of.items() if key not in keys}
        self.idle = [page for page in self.idle if page in self.key_of]

    @rule(page=st.integers(0, 11))
    def misuse(self, page: int) -> None:
        """A page that is not held can be neither released nor indexed; a page that is not indexed cannot be shared."""
        if page >= self.num_pages:
            return
        if page not in self.held():
            with pytest.raises(ValueError, match=f"page {page} is released"):
                self.pool.release([page])
            with pytest.raises(ValueError, match=f"page {page} is indexed"):
                self.pool.index_page(page, b"", IndexedPage(KEYS[0], KEYS[1], b""))
        if page not in self.key_of:
            with pytest.raises(ValueError, match=f"page {page} is not indexed"):
                self.pool.hold(page)

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = self.held()
        assert self.pool.num_held == len(held)
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_available == self.num_pages - len(held)
        for page in range(self.num_pages):
            assert self.pool.num_holders(page) == sum(holding.count(page) for holding in self.holdings)
        found = {self.pool.find(key): key for key in KEYS if self.pool.find(key) is not None}
        assert found == self.key_of
        for before in KEYS[:3]:
            following = {page: key for page, key in self.key_of.items() if parent_of(key) == before}
            assert dict(self.pool.pages_following(before)) == following

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for holding in self.holdings:
                self.pool.release(holding)
            assert self.pool.num_held == 0
            assert len(self.pool.allocate(self.num_pages)) == self.num_pages


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_pool_of_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative count"):
        PagePool(-1)


def indexed_page(pool: PagePool, key: bytes) -> int:
    """Allocate and index a page with this content."""
    (page,) = pool.allocate(1)
    pool.index_page(page, key, IndexedPage(key, parent_of(key), b""))
    return page


def evict_all(pool: PagePool) -> None:
    pool.release(pool.allocate(pool.num_available))


def test_mark_for_offload_finds_the_page_by_its_content() -> None:
    """A sequence's own page is not indexed if another page has its content; then the other one is marked."""
    pool = PagePool(2, num_host_pages=1)
    first, second = indexed_page(pool, KEYS[0]), indexed_page(pool, KEYS[0])
    pool.mark_for_offload([KEYS[0]])
    pool.release([first])
    pool.release([second])
    assert pool.num_idle == 1
    evict_all(pool)
    assert pool.host_offload.contains(KEYS[0])


def test_restored_page_is_saved_again_if_its_host_page_was_reused() -> None:
    pool = PagePool(2, num_host_pages=1)
    page = indexed_page(pool, KEYS[0])
    pool.mark_for_offload([KEYS[0]])
    pool.release([page])
    evict_all(pool)
    pool.host_offload.restore(KEYS[0])
    pool.host_offload.end_plan()
    restored = indexed_page(pool, KEYS[0])
    pool.host_offload.save(1 - restored, KEYS[1], b"")
    assert not pool.host_offload.contains(KEYS[0])
    pool.release([restored])
    evict_all(pool)
    assert pool.host_offload.contains(KEYS[0])


def test_unmarked_page_is_not_saved_when_it_is_evicted() -> None:
    pool = PagePool(2, num_host_pages=1)
    pool.release([indexed_page(pool, KEYS[0])])
    evict_all(pool)
    assert pool.host_offload.num_used == 0
