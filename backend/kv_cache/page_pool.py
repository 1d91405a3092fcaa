"""The pages of the KV cache: their holders, and the pages whose content can be found again.

A page is free, held by one or more sequences, or idle: no sequence holds it, but its content is indexed, so it may be
held again until it is evicted.

The memory itself belongs to the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.kv_cache.eviction import IdlePages
from penstock.backend.kv_cache.hand_over import HandOver, HandOverMemory
from penstock.backend.kv_cache.host_offload import HostOffload, IPageStore
from penstock.backend.kv_cache.page_hash import is_full_page_hash
from penstock.backend.kv_cache.page_index import FindablePages, FullPageObserver, IndexedPage, PageIndex


class PagePool:
    """A fixed number of pages. Owned by the scheduler; not shared between threads."""

    def __init__(
        self,
        num_pages: int,
        num_host_pages: int = 0,
        observers: Sequence[FullPageObserver] = (),
        store: IPageStore | None = None,
        names: FullPageObserver | None = None,
        texts: EarlierTexts | None = None,
    ) -> None:
        """store has the host pages, if they outlive this process.

        names learns of pages that are found on the device or on the host; observers and texts of those on the device.
        """
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        self.host_offload = HandOver(store) if isinstance(store, HandOverMemory) else HostOffload(num_host_pages, store)
        findable = None if names is None else FindablePages(names, self.host_offload)
        observers = (*([] if findable is None else [findable]), *observers, *([] if texts is None else [texts]))
        self._index = PageIndex(num_pages, observers)
        if texts is not None:
            texts.index = self._index
        if findable is not None:
            findable.watch(self._index)
        self._idle = IdlePages(self._index, self.host_offload, num_pages)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, and idle ones, which are evicted."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Return count pages with one holder, the caller, who releases each once.

        Free pages go first; then idle pages are evicted. Raises MemoryError, and allocates none, when fewer are
        available.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages requested, {self.num_available} available")
        pages = [self._free.pop() if self._free else self._idle.evict() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def find(self, page_hash: bytes) -> int | None:
        """The page with this content, held or idle. It may be evicted until the caller holds it."""
        return self._index.find(page_hash)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def hold(self, page: int) -> None:
        """Add a holder to a page found in the index. Raises ValueError for any other page."""
        if page not in self._index:
            raise ValueError(f"page {page} is not indexed: its content cannot be shared")
        self.pin(page)

    def pin(self, page: int) -> None:
        """Add a holder that only reads what is there, even if the page is still being filled. Raises ValueError for a
        free page."""
        if not self._num_holders[page] and page not in self._idle:
            raise ValueError(f"page {page} is free: it has no content")
        self._idle.discard(page)
        self._num_holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Raises ValueError for a page that is not held: releasing one twice would let two sequences write to it.

        The last page goes first: it is evicted first, so a sequence's beginning stays in the cache the longest.
        """
        for page in reversed(pages):
            if not self._num_holders[page]:
                raise ValueError(f"page {page} is released but not held")
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                if page in self._index:
                    self._idle.add(page)
                    if self.host_offload.saves_all:  # there too the beginning stays the longest
                        self.host_offload.touch(self._index.entry(page).page_hash)
                else:
                    self._free.append(page)

    def index_page(self, page: int, content: bytes, entry: IndexedPage) -> None:
        """Make a held page findable by its hash, and by its parent's hash and its content (int32 tokens).

        The content must not change from now on. Does nothing when another page has the same hash. Content that is on
        the host as well has been used more than once, so it is marked for offload. Raises ValueError for a page that is
        not held.
        """
        if not self._num_holders[page]:
            raise ValueError(f"page {page} is indexed but not held")
        self._index.add(page, entry, content, should_offload=self.host_offload.contains(entry.page_hash))
        if self.host_offload.saves_all and is_full_page_hash(entry.page_hash):
            self.host_offload.save(page, entry.page_hash, entry.salt)

    def pages_following(self, parent_hash: bytes) -> Iterator[tuple[int, bytes]]:
        """Pages that follow the page of this hash; see `PageIndex.children`."""
        return self._index.children(parent_hash)

    def mark_for_offload(self, page_hashes: list[bytes]) -> None:
        """Mark content that has been used more than once: it is saved to the host when its page is evicted, or now."""
        for page_hash in page_hashes:
            self._index.mark_for_offload(page_hash)
        if not self.host_offload.saves_all:
            return
        for page_hash in reversed(page_hashes):  # all before the first save: none of them makes room for another
            self.host_offload.touch(page_hash)
        for page_hash in reversed(page_hashes):
            if (page := self._index.find(page_hash)) is not None:
                self.host_offload.save(page, page_hash, self._index.entry(page).salt)

    def is_reused(self, page_hash: bytes) -> bool:
        """Whether `mark_for_offload` has been called for it."""
        page = self._index.find(page_hash)
        return page is not None and self._index.should_offload(page)

    def leave(self, page_hashes: Sequence[bytes]) -> None:
        """Leave this content, and each page that fills from now on, to the next backend, if there is memory for it."""

        def find(page_hash: bytes) -> tuple[int, bytes] | None:
            page = self._index.find(page_hash)
            return None if page is None else (page, self._index.entry(page).salt)

        if isinstance(self.host_offload, HandOver):
            self.host_offload.leave(page_hashes, find)

    def invalidate_tenant(self, salt: bytes) -> None:
        """Invalidate all cached pages of the tenant, here and on the host. Sequences keep the pages that they hold."""
        self.host_offload.invalidate_tenant(salt)
        for page in self._index.pages_of_tenant(salt):
            self._remove_from_index(page)

    def discard(self, page_hashes: list[bytes]) -> None:
        """Forget content that no request can ask for again, on the device and on the host."""
        self.host_offload.discard(page_hashes)
        for page_hash in page_hashes:
            if (page := self._index.find(page_hash)) is not None:
                self._remove_from_index(page)

    def _remove_from_index(self, page: int) -> None:
        """An idle page becomes free; a held one stays held."""
        self._index.remove(page)
        if page in self._idle:
            self._idle.discard(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each page is free, held or idle, and exactly the idle and some held ones are
        indexed."""
        held = {page for page, count in enumerate(self._num_holders) if count}
        free, idle = set(self._free), {page for page in range(self.num_pages) if page in self._idle}
        if len(free) != len(self._free) or free & idle or free & held or idle & held:
            raise RuntimeError("a page is in two states")
        if len(free) + len(idle) + len(held) != self.num_pages:
            raise RuntimeError(f"{len(free)} free, {len(idle)} idle and {len(held)} held of {self.num_pages} pages")
        if not all(page in self._index for page in idle) or any(page in self._index for page in free):
            raise RuntimeError("an idle page is not indexed, or a free page is")
        self._index.check_integrity()
        self._idle.check_integrity()
        self.host_offload.check_integrity()
