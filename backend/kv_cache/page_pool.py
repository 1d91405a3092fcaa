"""The pages of the KV cache: who holds which, and whose content can be found again.

A page is free, held by one or more sequences, or idle: held by nobody, but its content is known by a key and may be
held again until the page is needed for something else. Then what is wanted of it may be moved to the host. The memory
itself belongs to the forward pass.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.backend.kv_cache.host_offload import HostOffload


class PagePool:
    """A fixed number of pages. Owned by the scheduler; not shared between threads."""

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least 1 is needed")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        self._pages_after: dict[bytes, dict[int, bytes]] = {}
        """Key of the page before → the named pages that follow it, and their content."""
        self._key_before: dict[int, bytes] = {}
        self._salt_of_page: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._marked_for_offload: set[int] = set()
        """Named pages that are worth to be moved to the host."""
        self.host_offload = HostOffload(num_host_pages)

    @property
    def num_available(self) -> int:
        """Pages that `take` can bring: free ones, and idle ones whose content is then lost."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """count pages for the caller alone, who gives each back once. Raises MemoryError, taking none, when short."""
        if count > self.num_available:
            raise MemoryError(f"{count} pages asked, {self.num_available} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        if page in self._marked_for_offload:
            self.host_offload.save(page, self._key_of_page[page], self._salt_of_page[page])
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        self._marked_for_offload.discard(page)
        del self._salt_of_page[page]
        del self._page_of_key[self._key_of_page.pop(page)]
        before = self._key_before.pop(page)
        del self._pages_after[before][page]
        if not self._pages_after[before]:
            del self._pages_after[before]

    def find(self, key: bytes) -> int | None:
        """The page with this content, held or idle. The caller holds nothing by it."""
        return self._page_of_key.get(key)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def hold(self, page: int) -> None:
        """One more holder of a page found by its key."""
        if page not in self._key_of_page:
            raise ValueError(f"page {page} has no known content to share")
        self._idle.pop(page, None)
        self._num_holders[page] += 1

    def index_page(self, page: int, key: bytes, before: bytes, content: bytes, salt: bytes) -> None:
        """The content of a held page stays as it is, and from now on the page is found: by its key, or by what comes
        before it and its content, int32 tokens. A second page of that content is not. What lies on the host as well was
        wanted more than once."""
        if not self._num_holders[page]:
            raise ValueError(f"page {page} is named but not held")
        if key not in self._page_of_key and page not in self._key_of_page:
            self._page_of_key[key] = page
            self._key_of_page[page] = key
            self._key_before[page] = before
            self._salt_of_page[page] = salt
            self._pages_after.setdefault(before, {})[page] = content
            if self.host_offload.contains(key):
                self._marked_for_offload.add(page)

    def pages_following(self, before: bytes) -> dict[int, bytes]:
        """The named pages that follow the one of this key, and their content; the latest last. Not to be changed."""
        return self._pages_after.get(before, {})

    def mark_for_offload(self, keys: list[bytes]) -> None:
        """The content of these keys is, or was, wanted more than once: the pages that they name are worth to be moved
        to the host."""
        self._marked_for_offload.update(page for key in keys if (page := self._page_of_key.get(key)) is not None)

    def invalidate_tenant(self, salt: bytes) -> None:
        """The content of a tenant's pages, here and on the host, is not to be trusted: nobody finds it any more, and
        who holds them stays."""
        self.host_offload.invalidate_tenant(salt)
        for page in [page for page, its_salt in self._salt_of_page.items() if its_salt == salt]:
            self._remove_from_index(page)

    def discard(self, keys: list[bytes]) -> None:
        """Nobody will ask for the content of these keys again: it is kept neither here nor on the host."""
        self.host_offload.discard(keys)
        for key in keys:
            if (page := self._page_of_key.get(key)) is not None:
                self._remove_from_index(page)

    def _remove_from_index(self, page: int) -> None:
        """Who holds it stays; otherwise it is free."""
        self._forget(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def release(self, pages: list[int]) -> None:
        """Raises ValueError for a page that is not held: one given back twice would serve two sequences.

        The last page goes first, so that of a sequence's content the beginning is found the longest.
        """
        for page in reversed(pages):
            if not self._num_holders[page]:
                raise ValueError(f"page {page} is given back but not held")
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                if page in self._key_of_page:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each page is free, held or idle, and keys and pages match one to one."""
        held = {page for page, count in enumerate(self._num_holders) if count}
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free) or free & idle or free & held or idle & held:
            raise RuntimeError("a page is in two states")
        if len(free) + len(idle) + len(held) != self.num_pages:
            raise RuntimeError(f"{len(free)} free, {len(idle)} idle and {len(held)} held of {self.num_pages} pages")
        if {page: key for key, page in self._page_of_key.items()} != self._key_of_page:
            raise RuntimeError("keys and pages do not match")
        following = {page: before for before, pages in self._pages_after.items() for page in pages}
        if following != self._key_before or following.keys() != self._key_of_page.keys():
            raise RuntimeError("named pages and those that follow others do not match")
        if not idle <= self._key_of_page.keys() or free & self._key_of_page.keys():
            raise RuntimeError("an idle page has no key, or a free page has one")
        if self._salt_of_page.keys() != self._key_of_page.keys():
            raise RuntimeError("a named page has no tenant, or a page without a name has one")
        if not self._marked_for_offload <= self._key_of_page.keys():
            raise RuntimeError("a page is wanted whose content nobody knows")
        self.host_offload.check_integrity()

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]
