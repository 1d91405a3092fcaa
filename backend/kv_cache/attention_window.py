"""Which pages of a sequence are needed: all of them, or those within the window of the model's layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The tokens that a model's layers attend to. Pages behind the window are given back while their sequence runs."""

    page_size_tokens: int
    num_tokens: int = sys.maxsize
    """A token attends to itself and the num_tokens - 1 tokens before it, in every layer."""
    num_ahead_tokens: int = 0
    """The most tokens of a sequence in the steps that are planned and not applied."""

    @classmethod
    def of(
        cls,
        page_size_tokens: int,
        window_tokens: int | None,
        max_batch_tokens: int,
        num_plans_ahead: int,
        *,
        keeps_state: bool = False,
    ) -> AttentionWindow:
        """window_tokens: see `PassSpec`. A sequence with state keeps all pages, because it may begin again."""
        if window_tokens is None or keeps_state:
            return cls(page_size_tokens)
        return cls(page_size_tokens, window_tokens, (num_plans_ahead + 1) * max_batch_tokens)

    @property
    def is_bounded(self) -> bool:
        return self.num_tokens < sys.maxsize

    def num_passed_pages(self, num_computed: int) -> int:
        """First pages that no token after the first num_computed tokens attends to."""
        return max(0, num_computed - self.num_tokens + 1) // self.page_size_tokens

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size_tokens)

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sequence of num_tokens tokens holds at a time."""
        if num_tokens <= self.num_tokens:
            return self.pages_for(num_tokens)
        # Two more: the window may begin with the last token of a page, and a page is given up when another is full.
        return min(self.pages_for(num_tokens), self.pages_for(self.num_tokens - 1 + self.num_ahead_tokens) + 2)

    def longest_sequence(self, num_pages: int, longest: int) -> int:
        """The longest sequence that num_pages pages hold, up to `longest` tokens."""
        return longest if self.most_pages(longest) <= num_pages else min(longest, num_pages * self.page_size_tokens)

    def most_tokens(self, num_tokens: int) -> int:
        """The room in these pages that a sequence of num_tokens tokens can use."""
        return min(num_tokens, self.most_pages(num_tokens) * self.page_size_tokens)
