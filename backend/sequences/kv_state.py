"""A sequence's pages, and how many of their tokens are computed."""

from __future__ import annotations


class KvState:
    """The pages of one sequence. All but `page_hashes` is empty while the sequence waits."""

    __slots__ = (
        "is_suspect",
        "next_page_end",
        "num_cached",
        "num_indexed_pages",
        "num_passed_pages",
        "num_prefilled",
        "page_hashes",
        "pages",
    )

    def __init__(self) -> None:
        self.page_hashes: list[bytes] = []
        """Hashes of the first full pages; extended on demand."""
        self.pages: list[int] = []
        """By index; void where they are passed."""
        self.num_passed_pages = 0
        """First pages behind the window, which the sequence does not hold any more."""
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
        return self.pages[self.num_passed_pages :]

    def clear(self) -> None:
        """Forget the pages. The caller has released them."""
        self.pages = []
        self.num_passed_pages = 0
        self.num_cached = 0
        self.num_indexed_pages = 0
        self.is_suspect = False
