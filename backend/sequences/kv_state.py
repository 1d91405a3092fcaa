"""A sequence's pages, and how many of their tokens are computed."""

from __future__ import annotations


class KvState:
    """The pages of one sequence. All but `page_hashes` is empty while the sequence waits."""

    __slots__ = (
        "is_suspect",
        "next_page_end",
        "num_cached",
        "num_indexed_pages",
        "num_prefilled",
        "page_hashes",
        "pages",
        "passed",
    )

    def __init__(self) -> None:
        self.page_hashes: list[bytes] = []
        """Hashes of the first full pages; extended on demand."""
        self.pages: list[int] = []
        """Set by set, see `KvGroups`; void where they are passed."""
        self.passed: tuple[int, ...] = (0,)
        """By group, the first pages behind the window, which the sequence does not hold any more."""
        self.num_cached = 0
        """Tokens whose KV was found in the prefix cache at admission."""
        self.num_prefilled = 0
        """Given tokens whose KV is computed by applied steps."""
        self.num_indexed_pages = 0
        """First pages that are complete and known to the pool by their hash."""
        self.next_page_end = 0
        """Number of tokens that completes the next page."""
        self.is_suspect = False
        """The pages may hold bad values. No other sequence may find or copy them."""

    @property
    def held_pages(self) -> list[int]:
        passed = self.passed
        if len(passed) == 1:
            return self.pages[passed[0] :]
        count = len(passed)
        return [page for place, page in enumerate(self.pages) if place // count >= passed[place % count]]

    def drop_pages(self) -> None:
        self.pages = []
        self.passed = (0,) * len(self.passed)

    def clear(self) -> None:
        """Forget the pages. The caller has released them."""
        self.drop_pages()
        self.num_cached = 0
        self.num_indexed_pages = 0
        self.is_suspect = False
