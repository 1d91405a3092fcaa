"""Which pages of a sequence are needed: in each group of layers all, or those within the window of its layers."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Groups of layers with their own pages. Pages behind a group's window are released while their sequence runs.

    A sequence has one page of each group for the same tokens: a set. Its pages are listed set by set.
    """

    page_size_tokens: int
    windows: tuple[int, ...] = (sys.maxsize,)
    """By group: in its layers a token attends to itself and at most windows - 1 tokens before it."""
    num_ahead_tokens: int = 0
    """Most tokens of a sequence in steps that are planned but not applied."""

    @classmethod
    def of(
        cls,
        page_size_tokens: int,
        kv_windows: tuple[int | None, ...],
        max_batch_tokens: int,
        num_plans_ahead: int,
        *,
        keeps_state: bool = False,
    ) -> KvGroups:
        """kv_windows: see `PassSpec`. A sequence with state keeps all pages, because it may begin again."""
        windows = tuple(sys.maxsize if window is None or keeps_state else window for window in kv_windows)
        return cls(page_size_tokens, windows, (num_plans_ahead + 1) * max_batch_tokens)

    @property
    def count(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return min(self.windows) < sys.maxsize

    def num_passed(self, num_computed: int) -> tuple[int, ...]:
        """Number of first pages of each group that no token after the first num_computed tokens attends to."""
        return tuple([max(0, num_computed - window + 1) // self.page_size_tokens for window in self.windows])

    def pages_for(self, num_tokens: int) -> int:
        """Pages of all groups."""
        return self.count * self._sets_for(num_tokens)

    def most_pages(self, num_tokens: int) -> int:
        """Most pages that a sequence of num_tokens tokens holds at a time."""
        return sum([self._most_sets(window, num_tokens) for window in self.windows])

    def first_pages(self, num_tokens: int, passed: tuple[int, ...]) -> int:
        """Number of the pages for num_tokens that a sequence may list now, from the first.

        After the pages in passed, no group lists more pages than it ever holds.
        """
        ends = [first + self._most_sets(window, num_tokens) for first, window in zip(passed, self.windows, strict=True)]
        return self.count * min(self._sets_for(num_tokens), *ends)

    def later_pages(self, num_tokens: int, passed: tuple[int, ...], num_listed: int) -> int:
        """Number of pages that a sequence will add by num_tokens to the num_listed that it lists now.

        Only with several groups: a long prompt's pages are allocated as its steps come, so that windows need few.
        """
        num_sets, num_later = num_listed // self.count, 0
        for first, window in zip(passed, self.windows, strict=True):
            end = min(self._sets_for(num_tokens), first + self._most_sets(window, num_tokens))
            num_later += max(0, end - num_sets)
        return num_later

    def longest_sequence(self, num_pages: int, longest: int) -> int:
        """The longest sequence that num_pages pages hold, up to `longest` tokens."""
        return bisect_right(range(1, longest + 1), num_pages, key=self.most_pages)

    def most_tokens(self, num_tokens: int) -> int:
        """Room of a sequence of num_tokens tokens: the whole sets that it needs at a time, at most num_tokens."""
        return min(num_tokens, -(-self.most_pages(num_tokens) // self.count) * self.page_size_tokens)

    def _sets_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size_tokens)

    def _most_sets(self, window: int, num_tokens: int) -> int:
        if num_tokens <= window:
            return self._sets_for(num_tokens)
        # Two more: the window may begin with the last token of a page, and a page is given up when another is full.
        return min(self._sets_for(num_tokens), self._sets_for(window - 1 + self.num_ahead_tokens) + 2)
