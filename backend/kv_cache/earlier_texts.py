"""Guesses from the tenant's other texts: its prompts and answers whose pages are in the KV cache."""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np

from penstock.backend.kv_cache.page_index import PageIndex
from penstock.backend.sequences.prompt_lookup import NUM_EQUAL, mixed, mixed_runs

_MAX_BITS = 18
"""The table has at most this many bits of places, 4 bytes each; of more tokens those indexed last are found."""
_MAX_NEW = 4096
_PAGES_AT_ONCE = 64
_MAX_FOUND = 64


class EarlierTexts:
    """An index of full pages by three consecutive tokens, for all tenants. What it finds has the asker's salt.

    Implements `FullPageObserver`. Pages are indexed when somebody looks for a text, the newest first, a few at a
    time: a busy backend, which drafts nothing, has no work with them.
    """

    def __init__(self, num_pages: int, page_size_tokens: int) -> None:
        self.index: PageIndex | None = None
        """The pages. Set once, by their pool."""
        self._page_size = page_size_tokens
        num_bits = min(_MAX_BITS, (num_pages * page_size_tokens).bit_length() + 1)
        self._shift = 32 - num_bits
        self._places = array("i", bytes(4 << num_bits))
        """Hash of a salt and three tokens → page × page size + the index in the page of the token that followed them
        last; 0 for none. It is checked when it is found: pages change, and hashes collide."""
        self._new: deque[tuple[bytes, bytes, bytes]] = deque(maxlen=_MAX_NEW)
        """Hash, salt and content of pages that are not indexed yet."""

    def note_stored(self, page_hash: bytes, parent_hash: bytes, salt: bytes, content: bytes) -> None:  # noqa: ARG002
        self._new.append((page_hash, salt, content))

    def note_removed(self, page_hash: bytes) -> None:
        """Nothing is found in a page that has left the index."""

    def find(self, salt: bytes, tokens: array[int]) -> list[int]:
        """Up to _MAX_FOUND tokens that followed the last three tokens in a text of this salt; none if nothing did."""
        index = self.index
        if index is None or len(tokens) < NUM_EQUAL:
            return []
        self._index_new(index)
        place = (mixed(*tokens[-NUM_EQUAL:]) + hash(salt)) & 0xFFFFFFFF
        page, first = divmod(self._places[place >> self._shift], self._page_size)
        if page not in index or index.entry(page).salt != salt:
            return []
        found = array("i", index.content(page))
        if not first or found[first - NUM_EQUAL : first] != tokens[-NUM_EQUAL:]:
            return []
        del found[:first]
        while len(found) < _MAX_FOUND:
            child = next(index.children(index.entry(page).page_hash), None)
            if child is None:
                break
            page = child[0]
            found.frombytes(child[1])
        return found[:_MAX_FOUND].tolist()

    def _index_new(self, index: PageIndex) -> None:
        """Index pages that are new. If several places have one hash, the newest is kept."""
        newest = [self._new.pop() for _ in range(min(_PAGES_AT_ONCE, len(self._new)))]
        found = [(page, *fields) for hashed, *fields in reversed(newest) if (page := index.find(hashed)) is not None]
        if not found:
            return
        pages, salts, contents = zip(*found, strict=True)
        tokens = np.frombuffer(b"".join(contents), np.int32).reshape(len(found), -1)
        hashes = mixed_runs(tokens) + np.array([hash(salt) & 0xFFFFFFFF for salt in salts], np.uint32)[:, None]
        places = np.array(pages, np.int32)[:, None] * self._page_size + np.arange(NUM_EQUAL, self._page_size)
        np.frombuffer(self._places, np.int32)[hashes >> np.uint32(self._shift)] = places
