"""Eviction: which idle page is given up when the pool needs one, and whether its content is saved to the host."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backend.kv_cache.host_offload import HostOffload
    from penstock.backend.kv_cache.page_index import PageIndex


class IdlePages:
    """Indexed pages that no sequence holds, least recently held first. Owned by the page pool."""

    def __init__(self, index: PageIndex, host_offload: HostOffload) -> None:
        self._index = index
        self._host_offload = host_offload
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def add(self, page: int) -> None:
        self._pages[page] = None

    def discard(self, page: int) -> None:
        """Does nothing when the page is not idle."""
        self._pages.pop(page, None)

    def evict(self) -> int:
        """Remove the least recently held page from the index and return it; a marked one is saved to the host first.

        Raises KeyError when no page is idle.
        """
        page, _ = self._pages.popitem(last=False)
        entry = self._index.remove(page)
        if entry.should_offload:
            self._host_offload.save(page, entry.page_hash, entry.salt)
        return page
