"""Which page holds which content: found by the page's hash, or by the hash of the page before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.page_hash import is_full_page_hash


class IndexedPage(NamedTuple):
    """An indexed page. Its content does not change while it is indexed."""

    page_hash: bytes
    parent_hash: bytes
    """Hash of the page before it; the tenant's salt for a first page."""
    salt: bytes
    tenant: bytes = b""
    """The tenant that computed the page. It counts towards this tenant's share of the cache."""
    weight: float = 1.0


class FullPageObserver(Protocol):
    """Learns which full pages can be found. Partial pages change too often to report."""

    def note_stored(self, page_hash: bytes, parent_hash: bytes, salt: bytes, content: bytes) -> None:
        """content is int32 tokens. The salt is the tenant's, and the parent's hash of a first page."""

    def note_removed(self, page_hash: bytes) -> None: ...


_NUM_SHARDS = 256


class _Pages:
    """A table of pages by a hash. It consists of many small ones: a large one takes long to move when it is full."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_NUM_SHARDS)]

    def shard(self, key: bytes) -> dict[bytes, int]:
        """The part of the table for this key. Hashes are random; a salt may be empty."""
        return self._shards[key[0] if key else 0]

    def items(self) -> Iterator[tuple[bytes, int]]:
        return chain.from_iterable(shard.items() for shard in self._shards)


class PageIndex:
    """A page has one hash and a hash has one page. Owned by the page pool.

    Its tables do not grow: the garbage collector skips lists that were made at start, and tuples of bytes, so no page
    costs it anything.
    """

    def __init__(self, num_pages: int, observers: Sequence[FullPageObserver] = ()) -> None:
        self._observers = observers
        self._entries: list[tuple[bytes, bytes, bytes, bytes, float] | None] = [None] * num_pages
        """The fields of each indexed page's `IndexedPage`."""
        self._contents: list[bytes] = [b""] * num_pages
        self._should_offload = bytearray(num_pages)
        self._page_of_hash = _Pages()
        self._latest = _Pages()
        """Parent hash → the latest of the indexed pages that follow it."""
        self._older = array("i", [-1]) * num_pages
        """The page indexed before this one among those with its parent; -1 if there is none."""
        self._newer = array("i", self._older)

    def __contains__(self, page: int) -> bool:
        return self._entries[page] is not None

    def find(self, page_hash: bytes) -> int | None:
        return self._page_of_hash.shard(page_hash).get(page_hash)

    def entry(self, page: int) -> IndexedPage:
        """Raises KeyError."""
        return IndexedPage(*self._fields(page))

    def _fields(self, page: int) -> tuple[bytes, bytes, bytes, bytes, float]:
        if (fields := self._entries[page]) is None:
            raise KeyError(page)
        return fields

    def owner(self, page: int) -> tuple[bytes, float]:
        """The tenant to which it counts, and its weight. Raises KeyError."""
        fields = self._fields(page)
        return fields[3], fields[4]

    def content(self, page: int) -> bytes:
        """Its int32 tokens; empty if it is not indexed."""
        return self._contents[page]

    def children(self, parent_hash: bytes) -> Iterator[tuple[int, bytes]]:
        """Pages that follow the page of this hash, with their content; the latest first."""
        page = self._latest.shard(parent_hash).get(parent_hash, -1)
        while page >= 0:
            yield page, self._contents[page]
            page = self._older[page]

    def pages_of_tenant(self, salt: bytes) -> list[int]:
        return [page for page, fields in enumerate(self._entries) if fields is not None and fields[2] == salt]

    def add(self, page: int, entry: IndexedPage, content: bytes, *, should_offload: bool = False) -> None:
        """Does nothing when the page is indexed already, or another page has this hash.

        should_offload: see `should_offload`.
        """
        page_hash, parent_hash = entry.page_hash, entry.parent_hash
        pages = self._page_of_hash.shard(page_hash)
        if page_hash in pages or self._entries[page] is not None:
            return
        self._entries[page] = page_hash, parent_hash, entry.salt, entry.tenant, entry.weight
        self._contents[page] = content
        self._should_offload[page] = should_offload
        pages[page_hash] = page
        latest = self._latest.shard(parent_hash)
        self._older[page] = older = latest.get(parent_hash, -1)
        self._newer[page] = -1
        if older >= 0:
            self._newer[older] = page
        latest[parent_hash] = page
        if self._observers and is_full_page_hash(page_hash):
            for observer in self._observers:
                observer.note_stored(page_hash, parent_hash, entry.salt, content)

    def should_offload(self, page: int) -> bool:
        """Its content has been used more than once, so it is saved to the host when the page is evicted."""
        return bool(self._should_offload[page])

    def mark_for_offload(self, page_hash: bytes) -> None:
        """Does nothing when no page has this hash."""
        if (page := self.find(page_hash)) is not None:
            self._should_offload[page] = True

    def remove(self, page: int) -> None:
        """Raises KeyError."""
        page_hash, parent_hash, *_ = self._fields(page)
        self._entries[page], self._contents[page] = None, b""
        del self._page_of_hash.shard(page_hash)[page_hash]
        older, newer = self._older[page], self._newer[page]
        if older >= 0:
            self._newer[older] = newer
        if newer >= 0:
            self._older[newer] = older
        elif older >= 0:
            self._latest.shard(parent_hash)[parent_hash] = older
        else:
            del self._latest.shard(parent_hash)[parent_hash]
        if self._observers and is_full_page_hash(page_hash):
            for observer in self._observers:
                observer.note_removed(page_hash)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages, hashes and parents agree."""
        entries = {page: self.entry(page) for page, fields in enumerate(self._entries) if fields is not None}
        if {entry.page_hash: page for page, entry in entries.items()} != dict(self._page_of_hash.items()):
            raise RuntimeError("the index's pages and hashes do not match")
        parents = {page: parent for parent, _ in self._latest.items() for page, _ in self.children(parent)}
        if parents != {page: entry.parent_hash for page, entry in entries.items()}:
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
