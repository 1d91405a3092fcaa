"""Finds how much of a waiting sequence's prefix is computed already, or is being computed by a running sequence.

A prefix has up to three parts, in this order. Full pages are shared: the sequence holds them. Full pages on the host
are restored. In the page after those, tokens that match the beginning of another page are copied out of it; that page
is indexed, or a running sequence is still filling it. If the pass keeps a state, a prefix ends at a checkpoint of it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_hash import extend_page_hashes, partial_page_hash
from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.state_checkpoints import StateCheckpoints
from penstock.backend.sequences.sequence import Sequence

Awaited: TypeAlias = bytes | Sequence
"""Hash of a page that a running sequence is about to complete, or a running sequence: any progress it makes."""

_MAX_CANDIDATES = 16
"""The latest pages, and the latest running sequences, that are compared with a waiting sequence's partial page."""
_WORTH_WAITING = 8
"""Waiting for a step pays when it brings at least this fraction of a page: one part in 8."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a sequence that need not be computed. At least one token is left: its logits are needed."""

    pages: list[int]
    """Full pages to hold, set by set."""
    passed: tuple[int, ...]
    """By group, number of full pages before those that are behind the window: nobody reads them."""
    num_on_host: int = 0
    """Number of full pages after those whose content is on the host."""
    num_copied_tokens: int = 0
    """Tokens to copy into the page after those."""
    copy_source: int = -1
    """The page to copy them from."""
    awaited: Awaited | None = None
    """When this is computed, the prefix becomes longer."""
    num_shared_pages: int = 0
    """Number of full pages after which the sequence parts from another one, if it cannot begin there for want of a
    checkpoint."""

    @property
    def num_full_pages(self) -> int:
        """Number of a group's pages that need no computation."""
        return self.num_held_or_passed + self.num_on_host

    @property
    def num_held_or_passed(self) -> int:
        """Number of a group's pages."""
        return (len(self.pages) + sum(self.passed)) // len(self.passed)

    @property
    def listed_pages(self) -> list[int]:
        """The pages to hold, set by set, with 0 in place of each passed page."""
        if not any(self.passed):
            return self.pages
        pages = iter(self.pages)
        indices = range(self.num_held_or_passed)
        return [next(pages) if index >= first else 0 for index in indices for first in self.passed]


class PrefixCache:
    """The pages that running sequences are computing, and prefixes found among those and the pool's indexed pages.

    Owned by the scheduler; not shared between threads.
    """

    def __init__(self, pool: PagePool, groups: KvGroups, states: StateCheckpoints | None = None) -> None:
        """states: None if the pass keeps no state."""
        self._pool = pool
        self._states = states
        self._groups = groups
        self._page_size = groups.page_size_tokens
        self._computing: dict[bytes, Sequence] = {}
        """Hash of a page that a running sequence is about to complete → that sequence."""
        self._filling: defaultdict[bytes, dict[Sequence, None]] = defaultdict(dict)
        """Parent hash → the running sequences whose next page to complete follows that parent."""

    def find(self, sequence: Sequence) -> Prefix:
        """The sequence's longest prefix. Its pages may be evicted until the caller holds them."""
        num_known = len(sequence.tokens) - 1
        extend_page_hashes(sequence.kv.page_hashes, sequence.tokens, num_known, self._page_size, sequence.salt)
        page_hashes = sequence.kv.page_hashes[: sequence.num_reusable // self._page_size]
        found = self._find_held_pages(page_hashes)
        num_on_host = 0
        for page_hash in page_hashes[found.num_full_pages :]:
            if self._is_coming(page_hash) or not self._pool.host_offload.contains(page_hash):
                break
            num_on_host += 1
        found = replace(found, num_on_host=num_on_host)
        if self._states is not None:
            return self._end_at_state(sequence, found, page_hashes, self._states)
        for page_hash in page_hashes[found.num_full_pages :]:
            if not self._is_coming(page_hash):
                break
            found = replace(found, awaited=page_hash)
        return self._find_partial_page(sequence, found) if found.awaited is None else found

    def _end_at_state(
        self, sequence: Sequence, found: Prefix, page_hashes: list[bytes], states: StateCheckpoints
    ) -> Prefix:
        """The part of the prefix that ends at a checkpoint."""
        num_found = num_shared = found.num_full_pages
        num_usable = states.num_pages_before(page_hashes[:num_found])
        awaited, num_awaited = None, 0
        for num_pages, page_hash in enumerate(page_hashes[num_usable:], start=num_usable + 1):
            is_coming = self._is_coming(page_hash)
            if num_pages > num_found and not is_coming:
                break
            num_shared = max(num_shared, num_pages)
            if is_coming and states.is_coming(self._computing[page_hash], num_pages):
                awaited, num_awaited = page_hash, num_pages
        parts = num_shared > num_found or (num_found > num_usable and self._parts_after(sequence, num_found))
        return replace(
            found,
            pages=found.pages[: num_usable * self._groups.count],
            num_on_host=max(0, num_usable - found.num_held_or_passed),
            awaited=awaited if num_awaited - num_usable >= states.spacing_pages else None,
            num_shared_pages=num_shared if parts else 0,
        )

    def _parts_after(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether another sequence with the same first pages goes on with other tokens."""
        first, parent_hash = num_pages * self._page_size, _parent_hash(sequence, num_pages)
        own = sequence.tokens[first : first + self._page_size].tobytes()
        contents = [content for _, content in islice(self._pool.pages_following(parent_hash), _MAX_CANDIDATES)]
        running = islice(reversed(self._filling.get(parent_hash, {})), _MAX_CANDIDATES)
        contents += [other.tokens[first : first + self._page_size].tobytes() for other in running]
        return any(own[: len(content)] != content[: len(own)] for content in contents)

    def expect(self, awaited: Awaited) -> None:
        """A sequence waits for this: if the pass keeps a state, it is kept there."""
        if self._states is not None and isinstance(awaited, bytes):
            other = self._computing[awaited]
            self._states.expect(other, other.kv.page_hashes.index(awaited) + 1)

    def _find_held_pages(self, page_hashes: list[bytes]) -> Prefix:
        """The longest prefix whose pages within the windows are all in the pool."""
        windows = self._groups.windows
        if windows == (sys.maxsize,):  # most models, whose prompts may have thousands of pages
            return Prefix(self._find_first_pages(page_hashes), (0,))
        sets: list[list[int | None]] = []
        in_a_row = [0] * len(windows)
        num_full = 0
        for page_hash in page_hashes:
            pages = [self._pool.find(unit_hash) for unit_hash in self._hashes(page_hash)]
            if any(page is None and window == sys.maxsize for page, window in zip(pages, windows, strict=True)):
                break
            sets.append(pages)
            in_a_row = [0 if page is None else num + 1 for page, num in zip(pages, in_a_row, strict=True)]
            passed = self._groups.num_passed(len(sets) * self._page_size)
            if all(num >= len(sets) - first for num, first in zip(in_a_row, passed, strict=True)):
                num_full = len(sets)
        passed = self._groups.num_passed(num_full * self._page_size)
        found = enumerate(sets[:num_full])
        held = [
            page
            for index, pages in found
            for page, first in zip(pages, passed, strict=True)
            if page is not None and index >= first
        ]
        return Prefix(held, passed)

    def _find_first_pages(self, page_hashes: list[bytes]) -> list[int]:
        pages: list[int] = []
        for page_hash in page_hashes:
            if (page := self._pool.find(page_hash)) is None:
                break
            pages.append(page)
        return pages

    def _hashes(self, page_hash: bytes) -> list[bytes]:
        """The hashes of a set's pages. page_hash is the first group's."""
        return [page_hash, *[page_hash + bytes([group]) for group in range(1, self._groups.count)]]

    def _is_coming(self, page_hash: bytes) -> bool:
        """A running sequence is about to complete and index this page."""
        return page_hash in self._computing and not self._computing[page_hash].kv.is_suspect

    def _find_partial_page(self, sequence: Sequence, found: Prefix) -> Prefix:
        """Add the matching tokens of the page after the full ones. Only tokens of applied steps can be copied. Pages of
        several groups are not copied: a source would have to be found for each."""
        if self._groups.count > 1:
            return found
        num_full = found.num_full_pages
        first = num_full * self._page_size
        end = min(first + self._page_size - 1, sequence.num_reusable)
        content_needed = sequence.tokens[first:end].tobytes()
        parent_hash = _parent_hash(sequence, num_full)
        num_copied, source = 0, -1
        for page, content in islice(self._pool.pages_following(parent_hash), _MAX_CANDIDATES):
            if (num_common := count_common_tokens(content_needed, content)) > num_copied:
                num_copied, source = num_common, page
        num_coming, leader = 0, None
        for other in islice(reversed(self._filling.get(parent_hash, {})), _MAX_CANDIDATES):
            if other.kv.is_suspect:
                continue
            num_common = count_common_tokens(content_needed, other.tokens[first:end].tobytes())
            if (num_available := min(num_common, other.num_applied - first)) > num_copied:
                num_copied, source = num_available, other.kv.pages[num_full]
            if (num_known := min(num_common, other.num_given_tokens - first)) > num_coming:
                num_coming, leader = num_known, other
        is_worth_waiting = num_coming - num_copied >= max(1, self._page_size // _WORTH_WAITING)
        return replace(
            found, num_copied_tokens=num_copied, copy_source=source, awaited=leader if is_worth_waiting else None
        )

    def start(self, sequence: Sequence) -> None:
        """The sequence begins to run. Its first num_indexed_pages are the ones that it found."""
        kv = sequence.kv
        for num_pages, page_hash in enumerate(kv.page_hashes[kv.num_indexed_pages :], start=kv.num_indexed_pages + 1):
            other = self._computing.setdefault(page_hash, sequence)
            if self._states is not None and not self._states.is_coming(other, num_pages):
                self._computing[page_hash] = sequence
        self._filling[_parent_hash(sequence, kv.num_indexed_pages)][sequence] = None

    def note_computed(self, sequence: Sequence, num_tokens: int) -> list[Awaited]:
        """Index the pages that its first num_tokens fill. Return the hashes that no sequence needs to wait for any
        more."""
        kv = sequence.kv
        num_indexed, num_full = kv.num_indexed_pages, num_tokens // self._page_size
        kv.num_prefilled = num_tokens
        if num_full > num_indexed:
            num_hashed = num_full * self._page_size
            extend_page_hashes(kv.page_hashes, sequence.tokens, num_hashed, self._page_size, sequence.salt)
            for index in range(num_indexed, num_full):
                self._index_page(sequence, index, num_tokens)
        if self._states is not None:
            self._states.note_computed(sequence, num_tokens)
        if num_full <= num_indexed:
            return [sequence]
        self._stop_filling(sequence)
        kv.num_indexed_pages = num_full
        kv.next_page_end = (num_full + 1) * self._page_size
        self._filling[_parent_hash(sequence, num_full)][sequence] = None
        return [sequence, *self._end_computing(sequence, kv.page_hashes[num_indexed:num_full])]

    def stop(self, sequence: Sequence) -> list[Awaited]:
        """Note that the sequence stops running; it still holds its pages. Its partial page is indexed as well.

        Returns what no sequence needs to wait for any more.
        """
        kv = sequence.kv
        self._stop_filling(sequence)
        if self._groups.count == 1 and sequence.num_applied > kv.num_indexed_pages * self._page_size:
            self._index_page(sequence, kv.num_indexed_pages, sequence.num_applied)
        return [sequence, *self._end_computing(sequence, kv.page_hashes[kv.num_indexed_pages :])]

    def go_back(self, sequence: Sequence, num_pages: int) -> None:
        """Note that the sequence has only its first num_pages pages left, and computes the others again."""
        self._stop_filling(sequence)
        kv = sequence.kv
        kv.num_indexed_pages = num_pages
        kv.next_page_end = (num_pages + 1) * self._page_size
        self.start(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forget its pages: no request can ask for their content again."""
        if self._states is not None:
            self._states.pool.discard(sequence.kv.page_hashes)
        self._pool.discard([own for page_hash in sequence.kv.page_hashes for own in self._hashes(page_hash)])

    def invalidate_tenant(self, salt: bytes) -> None:
        """Invalidate all pages of the tenant, because the logits of one of its sequences were not finite.

        The pages of that sequence may hold bad KV, and so may the pages that it found, and pages of other sequences
        that shared or copied them since. Running sequences of the tenant index no more pages.
        """
        for sequences in self._filling.values():
            for sequence in sequences:
                sequence.kv.is_suspect |= sequence.salt == salt
        self._pool.invalidate_tenant(salt)
        if self._states is not None:
            self._states.pool.invalidate_tenant(salt)

    def _index_page(self, sequence: Sequence, index: int, num_applied: int) -> None:
        """Index one of its pages, full or partial, of all groups, unless its KV is suspect or useless to others."""
        if sequence.kv.is_suspect or (self._states is not None and not self._states.pool.num_pages):
            return
        first = index * self._page_size
        content = sequence.tokens[first : min(first + self._page_size, num_applied)].tobytes()
        parent_hash = _parent_hash(sequence, index)
        is_full = num_applied >= first + self._page_size
        page_hash = sequence.kv.page_hashes[index] if is_full else partial_page_hash(parent_hash, content)
        place, tenant, weight = index * self._groups.count, sequence.tenant, sequence.weight
        hashes = zip(self._hashes(page_hash), self._hashes(parent_hash), strict=True)
        for page, (own_hash, its_parent) in enumerate(hashes, start=place):
            entry = IndexedPage(own_hash, its_parent, sequence.salt, tenant=tenant, weight=weight)
            self._pool.index_page(sequence.kv.pages[page], content, entry)

    def _stop_filling(self, sequence: Sequence) -> None:
        parent_hash = _parent_hash(sequence, sequence.kv.num_indexed_pages)
        del self._filling[parent_hash][sequence]
        if not self._filling[parent_hash]:
            del self._filling[parent_hash]

    def _end_computing(self, sequence: Sequence, page_hashes: list[bytes]) -> list[bytes]:
        ended = [page_hash for page_hash in page_hashes if self._computing.get(page_hash) is sequence]
        for page_hash in ended:
            del self._computing[page_hash]
        return ended

    def check_integrity(self, running: dict[Sequence, None], parked: set[Awaited]) -> None:
        """Raises RuntimeError unless exactly the running sequences compute, and everything in parked is computed."""
        filling = [sequence for sequences in self._filling.values() for sequence in sequences]
        if len(filling) != len(running) or set(filling) != running.keys():
            raise RuntimeError(f"{len(filling)} sequences fill pages, {len(running)} run")
        if any(sequence not in running for sequence in self._computing.values()):
            raise RuntimeError("a page is computed by a sequence that does not run")
        if not parked <= self._computing.keys() | running.keys():
            raise RuntimeError("a sequence waits for a page or sequence that is not computed")
        for sequence in running:
            if sequence.kv.num_indexed_pages != sequence.num_applied // self._page_size:
                raise RuntimeError("a running sequence has a full page that is not indexed, or counts one too many")
            if sequence.num_applied > sequence.num_computed:
                raise RuntimeError("a running sequence has more tokens applied than planned")


def _parent_hash(sequence: Sequence, num_pages: int) -> bytes:
    """The hash of everything before the sequence's page of this index."""
    return sequence.kv.page_hashes[num_pages - 1] if num_pages else sequence.salt


def count_common_tokens(one: bytes, other: bytes) -> int:
    """The length of the common prefix of two texts, in int32 tokens. Bisects: comparing bytes is fast in C."""
    num_equal, num_unequal = 0, min(len(one), len(other)) // 4 + 1
    step = num_unequal - 1
    while step:
        end = num_equal + step
        if one[4 * num_equal : 4 * end] == other[4 * num_equal : 4 * end]:
            num_equal = end
        else:
            num_unequal = end
        step = (num_unequal - num_equal) // 2
    return num_equal
