"""The pages of the KV cache: who holds which. The memory itself belongs to the forward pass."""

from __future__ import annotations


class PagePool:
    """A fixed number of pages, each free or held. Owned by the scheduler; not shared between threads."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least 1 is needed")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """count pages for the caller, who gives each back once. Raises MemoryError, taking none, when short."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages asked, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_held[page] = 1
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Raises ValueError for a page that is not held: a page given back twice would serve two sequences."""
        for page in pages:
            if not self._is_held[page]:
                raise ValueError(f"page {page} is given back but not held")
            self._is_held[page] = 0
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each page is either free, once, or held."""
        if len(set(self._free)) != len(self._free) or any(self._is_held[page] for page in self._free):
            raise RuntimeError("the free list holds a page twice or a held page")
        if sum(self._is_held) != self.num_held:
            raise RuntimeError(f"{sum(self._is_held)} pages are marked held, {self.num_held} are not free")
