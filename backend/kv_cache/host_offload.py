"""Pages saved to the host's memory: which content is in which host page, and what is still to be copied there.

The memory itself belongs to the forward pass, see `IHostPages`; `StepBatch.page_restores` brings pages back. A host
page keeps its content after a restore, until it is used for other content.
"""

from __future__ import annotations

from collections import OrderedDict


class HostOffload:
    """A fixed number of host pages, which may be 0. Owned by the page pool; not shared between threads."""

    def __init__(self, num_host_pages: int) -> None:
        self._num_host_pages = num_host_pages
        self._free = list(range(num_host_pages - 1, -1, -1))
        self._host_page_of_hash: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._salt_of_hash: dict[bytes, bytes] = {}
        self._restored: set[bytes] = set()
        """Page hashes that the step being planned restores."""
        self._saves: dict[int, int] = {}
        """Host page → the page to copy there before any step writes to that page."""
        self.num_saved = 0
        self.num_restored = 0

    @property
    def num_used(self) -> int:
        return len(self._host_page_of_hash)

    def contains(self, page_hash: bytes) -> bool:
        return page_hash in self._host_page_of_hash

    def save(self, page: int, page_hash: bytes, salt: bytes) -> None:
        """Save a page that is being evicted. Does nothing when every host page is used by the step being planned."""
        if page_hash in self._host_page_of_hash:
            self._host_page_of_hash.move_to_end(page_hash)
            return
        if (host_page := self._free_host_page()) is not None:
            self._host_page_of_hash[page_hash] = host_page
            self._salt_of_hash[page_hash] = salt
            self._saves[host_page] = page
            self.num_saved += 1

    def _free_host_page(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._host_page_of_hash), None)
        if oldest is None or oldest in self._restored:  # then the step being planned restores all the others too
            return None
        return self._forget(oldest)

    def _forget(self, page_hash: bytes) -> int:
        del self._salt_of_hash[page_hash]
        return self._host_page_of_hash.pop(page_hash)

    def restore(self, page_hash: bytes) -> int:
        """The host page that the step being planned copies back from. Raises KeyError."""
        self._host_page_of_hash.move_to_end(page_hash)
        self._restored.add(page_hash)
        self.num_restored += 1
        return self._host_page_of_hash[page_hash]

    def end_plan(self) -> None:
        """The step is planned. Later saves may overwrite what it restores, because they run after it."""
        self._restored.clear()

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host page) pairs to copy before the next step is launched. The caller must launch that step."""
        saves = tuple((page, host_page) for host_page, page in self._saves.items())
        self._saves.clear()
        return saves

    def invalidate_tenant(self, salt: bytes) -> None:
        """Forget all content of the tenant."""
        self.discard([page_hash for page_hash, its_salt in self._salt_of_hash.items() if its_salt == salt])

    def discard(self, page_hashes: list[bytes]) -> None:
        """Forget this content. Hashes that are not saved here are ignored."""
        self._free += [self._forget(page_hash) for page_hash in page_hashes if page_hash in self._host_page_of_hash]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each host page is free or has one hash, and no step is being planned."""
        used = list(self._host_page_of_hash.values())
        if self._salt_of_hash.keys() != self._host_page_of_hash.keys():
            raise RuntimeError("content on the host has no tenant, or a tenant has content that is not there")
        if len(set(used) | set(self._free)) != self._num_host_pages or len(used) + len(self._free) != (
            self._num_host_pages
        ):
            raise RuntimeError(f"{len(used)} used and {len(self._free)} free of {self._num_host_pages} host pages")
        if self._restored:
            raise RuntimeError("host pages are marked as restored by a step that is planned already")
