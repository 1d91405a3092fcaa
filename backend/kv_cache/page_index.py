"""Which page holds which content: found by the page's hash, or by the hash of the page before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.backend.kv_cache.page_hash import is_full_page_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backend.kv_cache.host_offload import HostOffload


@dataclass(slots=True)
class IndexedPage:
    """An indexed page. Its content does not change while it is indexed."""

    page_hash: bytes
    parent_hash: bytes
    """Hash of the page before it; the tenant's salt for a first page."""
    salt: bytes
    should_offload: bool = False
    """Its content has been used more than once, so it is saved to the host when the page is evicted."""
    tenant: bytes = b""
    """The tenant that computed the page. It counts towards this tenant's share of the cache."""
    weight: float = 1.0


class FullPageObserver(Protocol):
    """Learns which full pages can be found. Partial pages change too often to report."""

    def note_stored(self, page_hash: bytes, parent_hash: bytes, salt: bytes, content: bytes) -> None:
        """content is int32 tokens. The salt is the tenant's, and the parent's hash of a first page."""

    def note_removed(self, page_hash: bytes) -> None: ...


class PageIndex:
    """A page has one hash and a hash has one page. Owned by the page pool."""

    def __init__(self, observers: Sequence[FullPageObserver] = ()) -> None:
        self._observers = observers
        self._pages: dict[int, IndexedPage] = {}
        self._page_of_hash: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, bytes]] = {}
        """Parent hash → the indexed pages that follow it, with their content."""

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def find(self, page_hash: bytes) -> int | None:
        return self._page_of_hash.get(page_hash)

    def entry(self, page: int) -> IndexedPage:
        """Raises KeyError."""
        return self._pages[page]

    def children(self, parent_hash: bytes) -> dict[int, bytes]:
        """Pages that follow the page of this hash, with their content; the latest last. Callers must not change the
        result."""
        return self._children.get(parent_hash, {})

    def pages_of_tenant(self, salt: bytes) -> list[int]:
        return [page for page, entry in self._pages.items() if entry.salt == salt]

    def add(self, page: int, entry: IndexedPage, content: bytes) -> None:
        """Does nothing when the page is indexed already, or another page has this hash."""
        if entry.page_hash not in self._page_of_hash and page not in self._pages:
            self._pages[page] = entry
            self._page_of_hash[entry.page_hash] = page
            self._children.setdefault(entry.parent_hash, {})[page] = content
            if self._observers and is_full_page_hash(entry.page_hash):
                for observer in self._observers:
                    observer.note_stored(entry.page_hash, entry.parent_hash, entry.salt, content)

    def mark_for_offload(self, page_hash: bytes) -> None:
        """Does nothing when no page has this hash."""
        if (page := self._page_of_hash.get(page_hash)) is not None:
            self._pages[page].should_offload = True

    def remove(self, page: int) -> IndexedPage:
        """Raises KeyError."""
        entry = self._pages.pop(page)
        del self._page_of_hash[entry.page_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[page]
        if not siblings:
            del self._children[entry.parent_hash]
        if self._observers and is_full_page_hash(entry.page_hash):
            for observer in self._observers:
                observer.note_removed(entry.page_hash)
        return entry

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages, hashes and parents agree."""
        if {entry.page_hash: page for page, entry in self._pages.items()} != self._page_of_hash:
            raise RuntimeError("the index's pages and hashes do not match")
        parents = {page: parent_hash for parent_hash, pages in self._children.items() for page in pages}
        if parents != {page: entry.parent_hash for page, entry in self._pages.items()}:
            raise RuntimeError("the index's pages and their parents do not match")


class FindablePages:
    """Names pages for the frontends, as long as a page can be found on the device or on the host.

    It stands between the index and the table of names. It also learns which pages the host forgets.

    Pages of an earlier process have no name until they are used: the store does not know their tokens.
    """

    def __init__(self, names: FullPageObserver, host: HostOffload) -> None:
        self._names = names
        self._host = host
        self.note_stored = names.note_stored

    def watch(self, index: PageIndex) -> None:
        def note_forgotten(page_hash: bytes) -> None:
            if is_full_page_hash(page_hash) and index.find(page_hash) is None:
                self._names.note_removed(page_hash)

        self._host.note_forgotten = note_forgotten

    def note_removed(self, page_hash: bytes) -> None:
        if page_hash not in self._host:
            self._names.note_removed(page_hash)
