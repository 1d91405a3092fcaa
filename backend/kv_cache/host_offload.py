"""Pages saved to host memory: which content is in which host page, and which copies are still to be made.

The memory itself belongs to the forward pass (`IHostPages`); `StepBatch.page_restores` brings pages back. A host page
keeps its content after a restore, until it is used for other content.

With a store the memory outlives the process: then every full page is saved, and pages saved by earlier processes are
found.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.backend.kv_cache.page_store import PersistedPage
from penstock.process.logs import RareLine

logger = logging.getLogger("penstock.backend")


class IPageStore(Protocol):
    """Remembers the content of host pages for later processes: a `PageStore`."""

    @property
    def first_place(self) -> int: ...

    @property
    def num_places(self) -> int: ...

    @property
    def found(self) -> Sequence[PersistedPage]: ...

    def publish(self, page: PersistedPage) -> None: ...

    def withdraw(self, index: int) -> None: ...

    def is_intact(self, index: int) -> bool: ...


@dataclass(slots=True, eq=False)
class _Saved:
    """Content that is on the host, or will be when its save is copied."""

    host_page: int
    salt: bytes
    is_unchecked: bool = False
    """An earlier process saved it, and it has not been compared with its checksum yet."""


class HostOffload:
    """A fixed number of host pages, which may be 0. Owned by the page pool; not shared between threads."""

    def __init__(self, num_host_pages: int, store: IPageStore | None = None) -> None:
        """With a store, num_host_pages is its number of places."""
        self._first_place = 0 if store is None else store.first_place
        self._num_host_pages = num_host_pages if store is None else store.num_places
        self._store = store
        self._saved: OrderedDict[bytes, _Saved] = OrderedDict()
        """By page hash, least recently used first."""
        self._free: list[int] = []
        self._restored: set[bytes] = set()
        """Page hashes that the step being planned restores."""
        self._saves: dict[int, int] = {}
        """Host page → the page to copy there before any step writes to that page."""
        self._uncopied: list[tuple[bytes, _Saved]] = []
        """With a store: what the next step's saves bring there."""
        self._copying: deque[list[tuple[bytes, _Saved]]] = deque()
        """The same for each launched step that has not ended."""
        self._damage = RareLine(logger, logging.ERROR)
        self.num_saved = 0
        self.num_restored = 0
        self.note_forgotten: Callable[[bytes], None] | None = None
        """Called with the hash of content that is no longer on the host."""
        self._take_over(() if store is None else store.found)

    def _take_over(self, found: Sequence[PersistedPage]) -> None:
        """Begin with the pages that earlier processes have saved."""
        for page in found:
            self._add_found(page)
        used = {saved.host_page for saved in self._saved.values()}
        places = range(self._first_place, self._first_place + self._num_host_pages)
        self._free = [place for place in reversed(places) if place not in used]

    def _add_found(self, page: PersistedPage) -> None:
        if (older := self._saved.pop(page.page_hash, None)) is not None and self._store is not None:
            self._store.withdraw(older.host_page)
        self._saved[page.page_hash] = _Saved(page.place, page.salt, is_unchecked=True)

    @property
    def num_used(self) -> int:
        return len(self._saved)

    @property
    def saves_all(self) -> bool:
        """Each full page must be saved at once, not only evicted pages that were used again."""
        return self._store is not None

    def contains(self, page_hash: bytes) -> bool:
        """Whether it can be restored.

        Content of an earlier process is compared with its checksum now; damaged content is forgotten.
        """
        saved = self._saved.get(page_hash)
        if saved is not None and saved.is_unchecked and self._store is not None:
            saved.is_unchecked = False
            if not self._store.is_intact(saved.host_page):
                self._damage.log("a page that an earlier backend saved is damaged; it is computed again")
                self.discard([page_hash])
                return False
        return saved is not None

    def __contains__(self, page_hash: bytes) -> bool:
        """Like `contains`, without a comparison."""
        return page_hash in self._saved

    def save(self, page: int, page_hash: bytes, salt: bytes) -> None:
        """Save a page whose content will be overwritten, or must be kept for later processes.

        Does nothing when the step being planned restores the least recently used content.
        """
        if page_hash in self._saved:
            self.touch(page_hash)
        elif (host_page := self._free_host_page()) is not None:
            saved = self._saved[page_hash] = _Saved(host_page, salt)
            self._saves[host_page] = page
            self.num_saved += 1
            if self._store is not None:
                self._uncopied.append((page_hash, saved))

    def touch(self, page_hash: bytes) -> None:
        """Mark as just used, so that other content makes room first. Does nothing if it is not saved here."""
        if page_hash in self._saved:
            self._saved.move_to_end(page_hash)

    def _free_host_page(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._saved), None)
        if oldest is None or oldest in self._restored:
            return None
        return self._forget(oldest)

    def _forget(self, page_hash: bytes) -> int:
        host_page = self._saved.pop(page_hash).host_page
        if self.note_forgotten is not None:
            self.note_forgotten(page_hash)
        if self._store is not None:
            self._store.withdraw(host_page)
        return host_page

    def restore(self, page_hash: bytes) -> int:
        """The host page that the step being planned copies back from. Raises KeyError."""
        self._saved.move_to_end(page_hash)
        self._restored.add(page_hash)
        self.num_restored += 1
        return self._saved[page_hash].host_page

    def end_plan(self) -> None:
        """The step is planned. Later saves may overwrite what it restores, because they run after it."""
        self._restored.clear()

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host page) pairs to copy before the next step is launched. The caller must launch that step."""
        saves = tuple((page, host_page) for host_page, page in self._saves.items())
        self._saves.clear()
        if self._store is not None:
            self._copying.append(self._uncopied)
            self._uncopied = []
        return saves

    def note_step_ended(self) -> None:
        """Note that the oldest step launched after `take_saves` has ended: later processes may find the pages that it
        saved."""
        if self._store is None:
            return
        for page_hash, saved in self._copying.popleft():
            if self._saved.get(page_hash) is saved:  # otherwise it was forgotten meanwhile
                self._store.publish(PersistedPage(saved.host_page, page_hash, saved.salt))

    def invalidate_tenant(self, salt: bytes) -> None:
        """Forget all content of the tenant."""
        self.discard([page_hash for page_hash, saved in self._saved.items() if saved.salt == salt])

    def discard(self, page_hashes: list[bytes]) -> None:
        """Forget this content, unless the step being planned restores it. Hashes that are not saved are ignored."""
        found = [page_hash for page_hash in page_hashes if page_hash in self._saved and page_hash not in self._restored]
        self._free += map(self._forget, found)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each host page is free or has one hash, and no step is being planned."""
        used = [saved.host_page for saved in self._saved.values()]
        if len(set(used) | set(self._free)) != self._num_host_pages or len(used) + len(self._free) != (
            self._num_host_pages
        ):
            raise RuntimeError(f"{len(used)} used and {len(self._free)} free of {self._num_host_pages} host pages")
        if self._restored:
            raise RuntimeError("host pages are marked as restored by a step that is planned already")
