"""Pages that outlive a process, against a model of what each hash's content is; and what makes a store unusable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.backend.errors import NoRoomBeside, StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.kv_cache import page_hash as hashing
from penstock.backend.kv_cache.budget.kv_plan import KvBudget, plan_kv
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.page_store import (
    KEY_BYTES,
    ROW_BYTES,
    PageStore,
    PageStoreError,
    PersistedPage,
    open_store,
)
from penstock.backend.passes.fake import FakePass
from tests.backend.kv_cache.test_page_pool import SALTS, salt_of

KEY = bytes(KEY_BYTES)
PAGE_BYTES = 72
PLACE_BYTES = 128
HEADER_BYTES = 4096
HASHES = [bytes([number]) * 16 for number in range(1, 9)]


def make_memory(num_places: int) -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, HEADER_BYTES + num_places * (ROW_BYTES + PLACE_BYTES))
    return fd


def content_of(page_hash: bytes) -> np.ndarray:
    return np.full(PAGE_BYTES, page_hash[0], np.uint8)


class PersistedPagesMachine(RuleBasedStateMachine):
    """A process saves and forgets pages, in steps that are copied late and end later; then it is killed."""

    @initialize(num_places=st.integers(1, 5))
    def begin(self, num_places: int) -> None:
        self.fd = make_memory(num_places)
        self.steps: list[list[tuple[int, int]]] = []
        """Saves of the launched steps: those that are not copied yet are last."""
        self.num_copied = 0
        self.published: dict[bytes, bytes] = {}
        """Hash → salt of what a later process must find."""
        self.pending: list[dict[bytes, object]] = []
        self.pages: dict[int, bytes] = {}
        self.start()

    def start(self) -> None:
        self.store = PageStore(self.fd, KEY, PAGE_BYTES)
        self.offload = HostOffload(0, self.store)

    def saved(self) -> dict[bytes, object]:
        """The content that is saved, with the identity of its save."""
        return dict(self.offload._saved)

    def forget_gone(self) -> None:
        self.published = {key: salt for key, salt in self.published.items() if key in self.saved()}

    @rule(page_hash=st.sampled_from(HASHES))
    def save(self, page_hash: bytes) -> None:
        self.pages[page_hash[0]] = page_hash
        self.offload.save(page_hash[0], page_hash, salt_of(page_hash))
        self.forget_gone()

    @rule()
    def launch(self) -> None:
        self.steps.append(list(self.offload.take_saves()))
        taken = {page_hash for steps in self.pending for page_hash in steps}
        new = {key: one for key, one in self.saved().items() if key not in taken and key not in self.published}
        self.pending.append(new)

    @rule(num_saves=st.integers(0, 2))
    def copy(self, num_saves: int) -> None:
        """The other thread copies some of the next saves; a kill may come between any two."""
        for _ in range(num_saves):
            while self.num_copied < len(self.steps) and not self.steps[self.num_copied]:
                self.num_copied += 1
            if self.num_copied == len(self.steps):
                return
            page, place = self.steps[self.num_copied].pop(0)
            self.store.place(place)[:] = content_of(self.pages[page])
            self.store.note_written(place)

    @rule()
    def end_step(self) -> None:
        if not self.steps:
            return
        while self.num_copied == 0 and self.steps[0]:
            self.copy(1)
        self.offload.note_step_ended()
        del self.steps[0]
        self.num_copied = max(0, self.num_copied - 1)
        saved = self.saved()
        for page_hash, one in self.pending.pop(0).items():
            if saved.get(page_hash) is one:
                self.published[page_hash] = salt_of(page_hash)

    @rule(salt=st.sampled_from(SALTS))
    def invalidate_tenant(self, salt: bytes) -> None:
        self.offload.invalidate_tenant(salt)
        self.forget_gone()
        assert all(salt_of(page_hash) != salt for page_hash in self.saved())

    @rule(page_hashes=st.lists(st.sampled_from(HASHES), unique=True))
    def discard(self, page_hashes: list[bytes]) -> None:
        self.offload.discard(page_hashes)
        self.forget_gone()

    @rule()
    def kill(self) -> None:
        self.start()
        self.steps, self.pending, self.num_copied = [], [], 0
        assert {page.page_hash: page.salt for page in self.store.found} == self.published
        for page in self.store.found:
            assert self.offload.contains(page.page_hash)
            assert (self.store.place(self.offload.restore(page.page_hash)) == content_of(page.page_hash)).all()
        self.offload.end_plan()

    @rule(place=st.integers(0, 4), byte=st.integers(0, PAGE_BYTES - 1))
    def kill_and_damage(self, place: int, byte: int) -> None:
        """Damaged pages are not found; the others are."""
        place %= self.store.num_places
        self.store.place(place)[byte] ^= 1
        damaged = {page_hash for page_hash, saved in self.offload._saved.items() if saved.host_page == place}
        self.start()
        self.steps, self.pending, self.num_copied = [], [], 0
        self.published = {key: salt for key, salt in self.published.items() if key not in damaged}
        for page in self.store.found:
            assert self.offload.contains(page.page_hash) == (page.page_hash not in damaged)

    @invariant()
    def pages_are_conserved(self) -> None:
        if hasattr(self, "offload"):
            self.offload.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


TestPersistedPagesMachine = PersistedPagesMachine.TestCase
TestPersistedPagesMachine.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.fixture
def fd() -> Iterator[int]:
    made = make_memory(4)
    yield made
    os.close(made)


def fill(store: PageStore, place: int, page_hash: bytes) -> None:
    store.place(place)[:] = content_of(page_hash)
    store.note_written(place)
    store.publish(PersistedPage(place, page_hash, b"salt"))


def test_pages_are_found_in_the_order_in_which_they_were_saved(fd: int) -> None:
    store = PageStore(fd, KEY, PAGE_BYTES)
    assert (store.num_places, store.found) == (4, [])
    for place in (2, 0, 3):
        fill(store, place, HASHES[place])
    later = PageStore(fd, KEY, PAGE_BYTES)
    assert later.secret == store.secret
    assert later.found == [PersistedPage(place, HASHES[place], b"salt") for place in (2, 0, 3)]


@pytest.mark.parametrize(("key", "page_bytes"), [(b"x" * KEY_BYTES, PAGE_BYTES), (KEY, 80)])
def test_pages_of_another_model_or_size_are_not_found(fd: int, key: bytes, page_bytes: int) -> None:
    store = PageStore(fd, KEY, PAGE_BYTES)
    fill(store, 1, HASHES[1])
    other = PageStore(fd, key, page_bytes)
    assert other.found == []
    assert other.secret != store.secret


@pytest.mark.parametrize("byte", [0, 16, 31, 32, 36, 40, 48])
def test_damaged_row_is_not_found(fd: int, byte: int) -> None:
    fill(PageStore(fd, KEY, PAGE_BYTES), 1, HASHES[1])
    at = HEADER_BYTES + ROW_BYTES + byte
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    assert PageStore(fd, KEY, PAGE_BYTES).found == []


def test_the_same_content_in_two_places_is_kept_once(fd: int) -> None:
    store = PageStore(fd, KEY, PAGE_BYTES)
    for place in (0, 1):
        fill(store, place, HASHES[0])
    offload = HostOffload(0, PageStore(fd, KEY, PAGE_BYTES))
    offload.check_integrity()
    assert offload.num_used == 1
    assert [page.place for page in PageStore(fd, KEY, PAGE_BYTES).found] == [1]


def test_memory_without_room_for_a_page_is_refused() -> None:
    fd = make_memory(0)
    with pytest.raises(PageStoreError, match="4096 bytes hold no page of 72 bytes"):
        PageStore(fd, KEY, PAGE_BYTES)
    os.close(fd)


def test_store_of_a_running_process_is_refused(fd: int) -> None:
    lock = f"import fcntl, sys; fcntl.lockf({fd}, fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,)
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        owner.stdout.readline()
        with pytest.raises(PageStoreError, match="another process uses it"):
            PageStore(fd, KEY, PAGE_BYTES)
        owner.stdin.close()
    assert PageStore(fd, KEY, PAGE_BYTES).found == []


@dataclass
class CpuPass:
    spec: PassSpec
    places: PageStore | None = None

    def persist_pages(self, places: PageStore) -> None:
        self.places = places


def open_with(
    fd: int,
    found: object,
    free_bytes: int = 1 << 30,
    window_tokens: int | None = None,
    *,
    beside_another: bool = False,
) -> PageStore | None:
    spec = PassSpec(8, 64, {"fp32": PAGE_BYTES // 4}, kv_windows=(window_tokens,))
    groups = KvGroups.of(4, (window_tokens,), 8, 1, keeps_state=False)
    plan = plan_kv(spec, budget=KvBudget(1 << 20), kv_dtype="auto", groups=groups, max_context_tokens=64, max_running=1)
    memory = MemoryInfo(free_bytes, free_bytes, "the host")
    model_dir = Path(__file__).parent
    return open_store(fd, found, plan, model_dir, "fp", memory, beside_another=beside_another)  # type: ignore[arg-type]


def test_pass_gets_the_store_and_pages_are_hashed_with_its_secret(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_secret", b"before")
    found = CpuPass(PassSpec(8, 64, {}))
    store = open_with(fd, found)
    assert store is not None
    assert found.places is store
    assert hashing._secret == store.secret


def test_pages_that_nobody_could_use_are_not_kept(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert open_with(fd, FakePass(8, 1)) is None
    assert "its forward pass cannot leave them" in caplog.text
    assert open_with(fd, CpuPass(PassSpec(8, 64, {}, kv_windows=(4,))), window_tokens=4) is None
    assert "they alone do not say how a sequence of this model goes on" in caplog.text
    assert os.fstat(fd).st_blocks == 0


def test_more_than_the_free_memory_is_refused_unless_it_is_allocated_already(fd: int) -> None:
    with pytest.raises(StartupError, match=r"--persist-kv is 4\.86 KB; 100 B are free on the host"):
        open_with(fd, CpuPass(PassSpec(8, 64, {})), free_bytes=100)
    with pytest.raises(NoRoomBeside):  # an upgrade then lets requests wait
        open_with(fd, CpuPass(PassSpec(8, 64, {})), free_bytes=100, beside_another=True)
    open_with(fd, CpuPass(PassSpec(8, 64, {})))
    assert open_with(fd, CpuPass(PassSpec(8, 64, {})), free_bytes=100) is not None


class Keeper:
    """A pool over a store, with held pages of content."""

    def __init__(self, fd: int) -> None:
        self.pool = PagePool(8, store=PageStore(fd, KEY, PAGE_BYTES))
        self.offload = self.pool.host_offload

    def index(self, page_hash: bytes) -> int:
        (page,) = self.pool.allocate(1)
        self.pool.index_page(page, page_hash, IndexedPage(page_hash, b"parent", b"salt"))
        return page


def test_prefix_that_is_used_again_makes_no_room_from_its_own_pages(fd: int) -> None:
    keeper = Keeper(fd)
    prefix, others = HASHES[:3], HASHES[3:5]
    for page_hash in (*prefix, *others):  # the store has four places: the first page makes room for the last one
        keeper.index(page_hash)
    assert not keeper.offload.contains(prefix[0])
    keeper.pool.mark_for_offload(prefix)
    assert all(keeper.offload.contains(page_hash) for page_hash in prefix)
    assert keeper.offload.num_saved == 6
    keeper.offload.check_integrity()


def test_page_that_is_about_to_be_restored_makes_no_room_for_the_prefix_before_it(fd: int) -> None:
    keeper = Keeper(fd)
    prefix = HASHES[:2]
    pages = [keeper.index(page_hash) for page_hash in prefix]
    keeper.offload.discard(prefix)
    tail = [keeper.index(page_hash) for page_hash in HASHES[2:6]]
    keeper.pool.release(tail)
    places = [keeper.offload.restore(page_hash) for page_hash in HASHES[2:6]]
    keeper.pool.mark_for_offload(prefix)
    assert sorted(places) == [0, 1, 2, 3]
    assert all(keeper.offload.contains(page_hash) for page_hash in HASHES[2:6])
    keeper.offload.end_plan()
    keeper.pool.release(pages)


def test_released_sequence_keeps_its_beginning_in_the_store_the_longest(fd: int) -> None:
    keeper = Keeper(fd)
    keeper.pool.release([keeper.index(page_hash) for page_hash in HASHES[:4]])
    keeper.index(HASHES[4])
    assert [keeper.offload.contains(page_hash) for page_hash in HASHES[:4]] == [True, True, True, False]
