"""Pages that a backend leaves to its successor while both run."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.backend.kv_cache import hand_over
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.hand_over import FIRST_STATE_PLACE, HandOver, HandOverMemory

KEY = bytes(32)
PAGE_BYTES = 72
SALT = b"tenant"
HASHES = [bytes([number]) * 16 for number in range(1, 25)]


class Backend:
    def __init__(self, fd: int, key: bytes = KEY, num_pages: int = 30, first_place: int = 0) -> None:
        self.now_s = 0.0
        self.memory = HandOverMemory(fd, key, PAGE_BYTES, num_pages, first_place)
        self.pages = HandOver(self.memory, lambda: self.now_s)
        self.saves: list[tuple[int, int]] = []

    def leave(self, page_hashes: list[bytes]) -> None:
        """A page has its hash's first byte as its number, and as its content."""
        self.pages.leave(page_hashes, lambda page_hash: (page_hash[0], SALT))

    def launch(self) -> None:
        self.saves = list(self.pages.take_saves())
        for page, place in self.saves:
            self.memory.place(place)[:] = page
            self.memory.note_written(place)

    def step(self) -> None:
        self.launch()
        self.pages.note_step_ended()
        self.now_s += 2.0

    def found(self) -> list[int]:
        """The contents of the pages that it finds, each under its own hash."""
        found = [page_hash for page_hash in HASHES if self.pages.contains(page_hash)]
        for page_hash in found:
            assert (self.memory.place(self.pages.restore(page_hash)) == page_hash[0]).all()
        self.pages.end_plan()
        self.pages.check_integrity()
        return [page_hash[0] for page_hash in found]

    def end(self) -> None:
        os.close(self.memory._fd)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("first_place", [0, FIRST_STATE_PLACE], ids=["pages", "checkpoints"])
def test_successor_finds_pages_as_they_are_saved_and_leaves_its_own_later(fd: int, first_place: int) -> None:
    old = Backend(fd, first_place=first_place)
    assert os.fstat(fd).st_blocks * 512 <= 4096
    new = Backend(fd, num_pages=40, first_place=first_place)
    assert (new.memory.secret, new.memory.follows, old.memory.follows) == (old.memory.secret, True, False)
    old.pages.save(1, HASHES[0], SALT)  # nobody has asked for pages yet
    old.step()
    assert (old.saves, new.found()) == ([], [])
    old.leave(HASHES[:20])
    old.launch()
    assert new.found() == []
    old.pages.note_step_ended()
    assert new.found() == list(range(1, 17))  # so many a step
    old.pages.save(21, HASHES[20], SALT)  # it has filled meanwhile
    old.step()
    assert new.found() == list(range(1, 22))
    new.step()
    assert new.found() == list(range(1, 22))
    old.end()
    new.launch()  # it may read them until it has ended
    new.pages.take_saves()
    new.pages.note_step_ended()
    assert new.found() == []
    assert os.fstat(fd).st_blocks * 512 > 4096
    new.pages.note_step_ended()
    assert os.fstat(fd).st_blocks * 512 <= 4096
    third = Backend(fd, first_place=first_place)
    new.leave(HASHES[:3])
    new.step()
    assert (third.memory.secret, third.found()) == (old.memory.secret, [1, 2, 3])


def test_third_backend_does_not_take_the_memory_that_an_idle_successor_reads(fd: int) -> None:
    old, new = Backend(fd), Backend(fd)
    old.leave(HASHES[:3])
    old.step()
    assert new.found() == [1, 2, 3]
    old.end()
    third = Backend(fd, num_pages=1)  # no step of the second has ended since
    assert (third.found(), new.found()) == ([1, 2, 3], [1, 2, 3])
    new.step()
    assert new.found() == [1, 2, 3]
    new.end()
    third.step()
    third.leave(HASHES[4:5])
    third.step()
    assert Backend(fd).found() == [5]


def test_place_is_written_once_because_the_successor_may_be_reading_it(fd: int) -> None:
    old = Backend(fd, num_pages=2)
    old.leave(HASHES[:2])
    old.step()
    old.pages.discard([HASHES[0]])
    old.pages.save(3, HASHES[2], SALT)
    old.step()
    old.pages.check_integrity()
    assert (old.saves, Backend(fd).found()) == ([], [2])


def test_damaged_page_is_not_found_and_an_invalidated_tenant_has_none(fd: int) -> None:
    old, new = Backend(fd), Backend(fd)
    old.leave(HASHES[:3])
    old.step()
    old.memory.place(1)[5] ^= 1
    assert new.found() == [1, 3]
    new.pages.invalidate_tenant(SALT)
    assert new.found() == []
    assert Backend(fd).found() == [1, 3]  # the old backend's rows are its own


def test_backend_with_another_key_takes_no_part_while_the_first_lives(fd: int) -> None:
    old, other = Backend(fd), Backend(fd, key=bytes(31) + b"x")
    assert (old.memory.is_usable, other.memory.is_usable) == (True, False)
    old.end()
    again = Backend(fd, key=bytes(31) + b"x")
    assert (again.memory.is_usable, again.memory.follows) == (True, False)


def test_memory_that_is_cut_is_not_mapped_and_that_of_a_backend_that_leaves_nothing_is_given_back(fd: int) -> None:
    first = Backend(fd)
    os.ftruncate(fd, mmap.PAGESIZE)
    assert not Backend(fd).memory.is_usable
    first.memory.close()
    other = Backend(fd, key=bytes(31) + b"x").memory
    assert (other.is_usable, other.follows) == (True, False)


def test_nothing_is_left_without_memory_for_it(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Backend(fd), Backend(fd)
    monkeypatch.setattr(hand_over, "host_memory", lambda: MemoryInfo(1000, 2 * 20 * PAGE_BYTES - 1, "this machine"))
    old.leave(HASHES[:20])
    old.step()
    assert (old.saves, new.found()) == ([], [])
    new.leave(HASHES[:3])  # it still follows
    new.step()
    assert new.saves == []
    assert not np.any(new.memory.place(0))
