"""Replaces the prefix cache when the pass keeps state for each sequence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from penstock.backend.kv_cache.prefix_cache import Prefix

if TYPE_CHECKING:
    from penstock.backend.kv_cache.prefix_cache import Awaited
    from penstock.backend.sequences.sequence import Sequence


class NoPrefixCache:
    """Finds nothing and indexes nothing: the state after a prefix is not in its pages, so no sequence can continue from
    it.

    Has the methods of `PrefixCache`.
    """

    def __init__(self, num_groups: int) -> None:
        self._nothing = Prefix([], (0,) * num_groups)

    def find(self, _sequence: Sequence) -> Prefix:
        return self._nothing

    def start(self, sequence: Sequence) -> None:
        sequence.kv.next_page_end = sys.maxsize  # no page is indexed when it is full

    def note_computed(self, sequence: Sequence, num_tokens: int) -> list[Awaited]:
        sequence.kv.num_prefilled = num_tokens
        return []

    def stop(self, _sequence: Sequence) -> list[Awaited]:
        return []

    def discard(self, _sequence: Sequence) -> None:
        pass

    def invalidate_tenant(self, _salt: bytes) -> None:
        pass

    def check_integrity(self, running: dict[Sequence, None], parked: set[Awaited]) -> None:
        """Raises RuntimeError if a sequence waits for another's pages, or has more applied than planned."""
        if parked:
            raise RuntimeError("a sequence waits for pages that it cannot use")
        if any(sequence.num_applied > sequence.num_computed for sequence in running):
            raise RuntimeError("a running sequence has more tokens applied than planned")
