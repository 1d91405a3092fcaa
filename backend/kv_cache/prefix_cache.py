"""What of a waiting sequence's beginning is computed already, or is being computed by a running one.

Full pages are shared: whoever finds one by its key holds it. Of the page after those, the tokens that agree are copied
out of a page that begins with them: one that has a name, or one that a running sequence is still filling. Full pages
that were moved to the host come between the two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from penstock.backend.kv_cache.page_hash import extend_page_hashes, partial_page_hash

if TYPE_CHECKING:
    from penstock.backend.kv_cache.page_pool import PagePool
    from penstock.backend.sequences.sequence import Sequence

    Awaited: TypeAlias = bytes | Sequence
    """The key of a page that a running sequence is about to complete; or a running sequence, whatever it does next."""

_MAX_CANDIDATES = 16
"""Pages, and running sequences, that are compared with a waiting sequence's part-filled page: the latest ones."""
_WORTH_WAITING = 8
"""A step is waited for where it brings this part of a page."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence need not compute. One token at least is left: the logits of the last one are needed."""

    pages: list[int]
    """Full ones, to be held."""
    num_on_host: int = 0
    """Full ones after those, whose content lies on the host."""
    num_copied_tokens: int = 0
    """Tokens in the page after those that..."""
    copy_source: int = -1
    """...this page begins with as well."""
    awaited: Awaited | None = None
    """More will be there when this is."""

    @property
    def num_full_pages(self) -> int:
        """Pages of which nothing need be computed."""
        return len(self.pages) + self.num_on_host


class PrefixCache:
    """Which running sequences are computing which pages, and what is found by comparing with them and the pool's."""

    def __init__(self, pool: PagePool, page_size_tokens: int) -> None:
        self._pool = pool
        self._page_size = page_size_tokens
        self._computing: dict[bytes, Sequence] = {}
        """Key of a page that a running sequence is about to complete → that sequence."""
        self._filling: defaultdict[bytes, dict[Sequence, None]] = defaultdict(dict)
        """Key of the page before → the running sequences that have this page next to complete."""

    def find(self, sequence: Sequence) -> Prefix:
        """The caller holds nothing by it."""
        num_wanted = len(sequence.tokens) - 1
        extend_page_hashes(sequence.page_hashes, sequence.tokens, num_wanted, self._page_size, sequence.salt)
        keys = sequence.page_hashes[: num_wanted // self._page_size]
        pages: list[int] = []
        for key in keys:
            if (page := self._pool.find(key)) is None:
                break
            pages.append(page)
        num_on_host = 0
        for key in keys[len(pages) :]:
            if self._is_coming(key) or not self._pool.host_offload.contains(key):
                break
            num_on_host += 1
        awaited = None
        for key in keys[len(pages) + num_on_host :]:
            if not self._is_coming(key):
                break
            awaited = key
        found = Prefix(pages, num_on_host, awaited=awaited)
        return self._find_part(sequence, found) if awaited is None else found

    def _is_coming(self, key: bytes) -> bool:
        """A running sequence is about to complete the page, and it will be found."""
        return key in self._computing and not self._computing[key].has_suspect_kv

    def _find_part(self, sequence: Sequence, found: Prefix) -> Prefix:
        """Tokens of the page after the full ones. Only what steps have computed that are applied is there to copy."""
        num_full = found.num_full_pages
        first = num_full * self._page_size
        end = min(first + self._page_size, len(sequence.tokens)) - 1
        wanted = sequence.tokens[first:end].tobytes()
        before = _key_before(sequence, num_full)
        num_copied, source = 0, -1
        for page, content in islice(reversed(self._pool.pages_following(before).items()), _MAX_CANDIDATES):
            if (num_common := count_common(wanted, content)) > num_copied:
                num_copied, source = num_common, page
        num_coming, leader = 0, None
        for other in islice(reversed(self._filling.get(before, {})), _MAX_CANDIDATES):
            if other.has_suspect_kv:
                continue
            num_common = count_common(wanted, other.tokens[first:end].tobytes())
            if (num_there := min(num_common, other.num_applied - first)) > num_copied:
                num_copied, source = num_there, other.pages[num_full]
            if (num_known := min(num_common, other.num_given_tokens - first)) > num_coming:
                num_coming, leader = num_known, other
        is_worth_waiting = num_coming - num_copied >= max(1, self._page_size // _WORTH_WAITING)
        return replace(
            found, num_copied_tokens=num_copied, copy_source=source, awaited=leader if is_worth_waiting else None
        )

    def start(self, sequence: Sequence) -> None:
        """The sequence runs from now on; its num_indexed_pages are found ones."""
        for key in sequence.page_hashes[sequence.num_indexed_pages :]:
            self._computing.setdefault(key, sequence)
        self._filling[_key_before(sequence, sequence.num_indexed_pages)][sequence] = None

    def note_computed(self, sequence: Sequence, num_tokens: int) -> list[Awaited]:
        """Names the pages that its first num_tokens fill, and returns what nobody needs to wait for any more."""
        num_named, num_full = sequence.num_indexed_pages, num_tokens // self._page_size
        sequence.num_prefilled = num_tokens
        if num_full <= num_named:
            return [sequence]
        extend_page_hashes(
            sequence.page_hashes, sequence.tokens, num_full * self._page_size, self._page_size, sequence.salt
        )
        for index in range(num_named, num_full):
            self._name(sequence, index, num_tokens)
        self._leave(sequence)
        sequence.num_indexed_pages = num_full
        sequence.next_page_end = (num_full + 1) * self._page_size
        self._filling[_key_before(sequence, num_full)][sequence] = None
        return [sequence, *self._end_computing(sequence, sequence.page_hashes[num_named:num_full])]

    def stop(self, sequence: Sequence) -> list[Awaited]:
        """The sequence runs no longer. It still holds its pages; of a part-filled one the content is kept as well."""
        self._leave(sequence)
        if sequence.num_applied > sequence.num_indexed_pages * self._page_size:
            self._name(sequence, sequence.num_indexed_pages, sequence.num_applied)
        return [sequence, *self._end_computing(sequence, sequence.page_hashes[sequence.num_indexed_pages :])]

    def invalidate_tenant(self, salt: bytes) -> None:
        """The logits of one of a tenant's sequences were bad, and so may be what its pages hold, those that it had
        found, and those that others found or copied from since: nobody is to find any page that the tenant has now."""
        for sequences in self._filling.values():
            for sequence in sequences:
                sequence.has_suspect_kv |= sequence.salt == salt
        self._pool.invalidate_tenant(salt)

    def _name(self, sequence: Sequence, index: int, num_applied: int) -> None:
        """One of its pages, full or not; not if it may be bad."""
        if sequence.has_suspect_kv:
            return
        first = index * self._page_size
        content = sequence.tokens[first : min(first + self._page_size, num_applied)].tobytes()
        before = _key_before(sequence, index)
        is_full = num_applied >= first + self._page_size
        key = sequence.page_hashes[index] if is_full else partial_page_hash(before, content)
        self._pool.index_page(sequence.pages[index], key, before, content, sequence.salt)

    def _leave(self, sequence: Sequence) -> None:
        before = _key_before(sequence, sequence.num_indexed_pages)
        del self._filling[before][sequence]
        if not self._filling[before]:
            del self._filling[before]

    def _end_computing(self, sequence: Sequence, keys: list[bytes]) -> list[bytes]:
        ended = [key for key in keys if self._computing.get(key) is sequence]
        for key in ended:
            del self._computing[key]
        return ended

    def check_integrity(self, running: dict[Sequence, None], parked: set[Awaited]) -> None:
        """Raises RuntimeError unless exactly the running sequences compute, and nobody waits for what nobody does."""
        filling = [sequence for sequences in self._filling.values() for sequence in sequences]
        if len(filling) != len(running) or set(filling) != running.keys():
            raise RuntimeError(f"{len(filling)} sequences fill pages, {len(running)} run")
        if any(sequence not in running for sequence in self._computing.values()):
            raise RuntimeError("a page is computed by a sequence that does not run")
        if not parked <= self._computing.keys() | running.keys():
            raise RuntimeError("a sequence waits for what nobody computes")
        for sequence in running:
            if sequence.num_indexed_pages != sequence.num_applied // self._page_size:
                raise RuntimeError("a running sequence has a full page without a name, or a name too many")
            if sequence.num_applied > sequence.num_computed:
                raise RuntimeError("more is applied than was planned")


def _key_before(sequence: Sequence, num_pages: int) -> bytes:
    """The key of all that comes before the sequence's page of this index."""
    return sequence.page_hashes[num_pages - 1] if num_pages else sequence.salt


def count_common(one: bytes, other: bytes) -> int:
    """How many int32 tokens two texts begin with in common."""
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
