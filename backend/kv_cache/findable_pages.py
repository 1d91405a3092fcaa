"""Names of pages for the frontends, while a page can be found on the device or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.kv_cache.page_hash import is_full_page_hash

if TYPE_CHECKING:
    from penstock.backend.kv_cache.host_offload import HostOffload
    from penstock.backend.kv_cache.page_index import FullPageObserver, PageIndex


class FindablePages:
    """A `FullPageObserver` between the index and the table of names. It also learns which pages the host forgets.

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
