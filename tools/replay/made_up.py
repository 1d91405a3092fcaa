"""Prompts for a recording without tokens: they share beginnings where the recorded prompts did, and nowhere else.

A token is a hash of its position and of the sequence that it comes from. A sequence takes over the beginning of another
one if the recording has equal prints of their pages, or if its tokens were found in the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PRINT_BYTES = 8
NUM_STOP_IDS = 16
"""The first ids of the vocabulary are stop tokens; no made-up token is one of them."""
_MAX_CANDIDATES = 1000
"""Earlier sequences that are searched for the source of cached tokens."""


@dataclass(slots=True)
class Origins:
    """The sequences that the tokens of a sequence come from: origins[i] from starts[i] on."""

    starts: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)

    def at(self, position: int) -> int:
        return self.origins[bisect_right(self.starts, position) - 1]

    def copy(self, other: Origins, first: int, end: int) -> None:
        """Take over the tokens first … end - 1, which follow those known here."""
        while first < end:
            index = bisect_right(other.starts, first)
            self.add(first, other.origins[index - 1])
            first = min(end, other.starts[index]) if index < len(other.starts) else end

    def add(self, start: int, origin: int) -> None:
        if not self.origins or self.origins[-1] != origin:
            self.starts.append(start)
            self.origins.append(origin)


@dataclass(frozen=True, slots=True)
class _Known:
    tenant: str
    prints: tuple[bytes, ...]
    final_tokens: int
    origins: Origins


class MadeUpTokens:
    """Makes tokens. Add the sequences in the order in which they started."""

    def __init__(self, page_size: int, vocab_size: int) -> None:
        """page_size is 0 for a model without pages."""
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._by_number: dict[int, Origins] = {}
        self._owner_of_print: dict[bytes, Origins] = {}
        self._recent: deque[_Known] = deque(maxlen=_MAX_CANDIDATES)

    def add(self, number: int, tenant: str, prints: bytes, num_cached: int, num_tokens: int, final_tokens: int) -> None:
        """A sequence started with num_tokens, of which num_cached were found, and ended with final_tokens. prints are
        those of its first full pages."""
        size = self._page_size
        num_pages = min(len(prints) // PRINT_BYTES, num_tokens // size) if size else 0
        pages = tuple(prints[PRINT_BYTES * page : PRINT_BYTES * (page + 1)] for page in range(num_pages))
        origins = Origins()
        num_known = 0
        while num_known < num_pages and (owner := self._owner_of_print.get(pages[num_known])) is not None:
            origins.copy(owner, num_known * size, (num_known + 1) * size)
            num_known += 1
        start, end = num_known * size, min(num_cached, num_tokens)
        if start < end and (source := self._source(tenant, pages, end)) is not None:
            origins.copy(source, start, end)
            start = end
        origins.add(start, number)
        for page in pages[num_known:]:
            self._owner_of_print.setdefault(page, origins)
        self._by_number[number] = origins
        self._recent.append(_Known(tenant, pages, final_tokens, origins))

    def _source(self, tenant: str, pages: tuple[bytes, ...], num_cached: int) -> Origins | None:
        """The latest of the sequences with the longest common beginning that generated the cached tokens."""
        best: _Known | None = None
        for known in reversed(self._recent):
            if (
                known.tenant == tenant
                and known.final_tokens >= num_cached
                and known.prints == pages[: len(known.prints)]
                and (best is None or len(known.prints) > len(best.prints))
            ):
                best = known
        return None if best is None else best.origins

    def prompt(self, number: int, num_tokens: int) -> bytes:
        """The first tokens of a sequence, packed."""
        known = self._by_number.get(number)
        if known is None:
            origins = np.full(num_tokens, number, np.int64)
        else:
            starts = [min(start, num_tokens) for start in known.starts]
            origins = np.repeat(np.array(known.origins, np.int64), np.diff([*starts, num_tokens]))
        return self._tokens(origins, np.arange(num_tokens)).tobytes()

    def sampled(self, numbers: list[int], positions: list[int]) -> NDArray[np.int32]:
        """The tokens of these sequences at these positions."""
        known = self._by_number
        origins = [
            known[number].at(position) if number in known else number
            for number, position in zip(numbers, positions, strict=True)
        ]
        return self._tokens(np.array(origins, np.int64), np.array(positions, np.int64))

    def _tokens(self, origins: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        # The finaliser of SplitMix64 (Steele et al., OOPSLA 2014).
        x = (origins.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        tokens: NDArray[np.int32] = (NUM_STOP_IDS + x % np.uint64(self._vocab_size - NUM_STOP_IDS)).astype(np.int32)
        return tokens
