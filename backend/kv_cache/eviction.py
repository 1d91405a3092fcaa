"""Eviction: chooses the idle page to give up when the pool needs one, and whether its content is saved to the host."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.page_index import PageIndex

_GROWTH = 1.125
"""A tenant is ranked again when its pages have grown or shrunk by this factor."""
_STALE_TURNOVERS = 4
"""A page is evicted first, whatever its tenant's share, once this many times the pool's pages were released since."""

# How the tenant that loses a page is found. It is the one with the most idle pages for its weight, or nearly. An exact
# heap would need a push for every page that becomes idle or is taken again, and there are thousands of these a second.
# So a tenant keeps the rank of a former count, and two rules bound the error:
#
#   grown    `add` ranks a tenant again as soon as its pages exceed 1.125 times its rank. Nobody has more than that.
#   shrunk   `discard` does nothing: the tenant's rank is too high, so it rises to the top of the heap too early, and
#            there `_choose` sees that 1.125 times its pages are below its rank, and ranks it again, lower.
#
# So whoever is chosen at the top has at least rank / 1.125, and all others at most rank * 1.125: at least 0.79 of the
# most. A tenant is ranked again only when an eighth of its pages have come or gone, which is why it costs little.
#
# Nothing is taken out of the middle of a heap. A new rank is a new entry; the old one no longer equals the tenant's
# rank and is stale, as is an entry of a tenant that lost all its pages, for it is another object when it comes back.
# Stale entries are dropped at the top, and all at once when they outnumber the tenants.


# Nothing is stored in objects or tables that grow with the pages: a table of a million entries takes tens of ms to move
# when it is full, and as long to search for garbage. A page's place in each order is in arrays, as a ring of links.


class PageRings:
    """Orders of pages: each page is in at most one ring. The numbers behind the pages are the rings' beginnings."""

    __slots__ = ("_newer", "_older")

    def __init__(self, num_pages: int) -> None:
        self._older = array("i", [-1]) * num_pages
        """-1 for a page in no ring."""
        self._newer = array("i", self._older)

    def open(self) -> int:
        """Make one more ring, which is empty."""
        ring = len(self._older)
        self._older.append(ring)
        self._newer.append(ring)
        return ring

    def __contains__(self, page: int) -> bool:
        return self._older[page] >= 0

    def append(self, ring: int, page: int) -> None:
        older, newer = self._older, self._newer
        last = older[ring]
        newer[last] = older[ring] = page
        older[page], newer[page] = last, ring

    def remove(self, page: int) -> None:
        older, newer = self._older[page], self._newer[page]
        self._newer[older], self._older[newer] = newer, older
        self._older[page] = -1

    def oldest(self, ring: int) -> int:
        """The ring itself if it is empty."""
        return self._newer[ring]

    def pages(self, ring: int) -> Iterator[int]:
        """The oldest comes first."""
        page = self._newer[ring]
        while page != ring:
            yield page
            page = self._newer[page]


class _TenantPages:
    """One tenant's idle pages."""

    __slots__ = ("num_pages", "rank", "ring", "tenant", "weight")

    def __init__(self, tenant: bytes, ring: int) -> None:
        self.tenant = tenant
        self.ring = ring
        self.weight = 1.0
        self.num_pages = 0
        self.rank = 0.0
        """Its pages divided by its weight when it was last ranked."""


class IdlePages:
    """Indexed pages that no sequence holds. Owned by the page pool.

    With one tenant, the least recently held page is evicted. With several, the tenant with the most idle pages for its
    weight loses its least recently held page. So each tenant keeps its share of the cache, however much others use. A
    tenant that does not come back keeps its pages only for a while (`_STALE_TURNOVERS`).
    """

    def __init__(self, index: PageIndex, host_offload: HostOffload, num_pages: int) -> None:
        self._index = index
        self._host_offload = host_offload
        self._max_age = _STALE_TURNOVERS * num_pages
        self._num_added = self._num_pages = 0
        self._numbers = array("q", bytes(8 * num_pages))
        """By page: how many pages were added before it."""
        self._all = PageRings(num_pages)
        self._ring = self._all.open()
        """All idle pages, least recently held first."""
        self._own = PageRings(num_pages)
        """A ring for each tenant."""
        self._free_rings: list[int] = []
        self._owners: list[_TenantPages | None] = [None] * num_pages
        """By page: the tenant's pages that it belongs to; None if it is not idle."""
        self._tenants: dict[bytes, _TenantPages] = {}
        """Tenants that have idle pages."""
        self._ranking: list[tuple[float, int, _TenantPages]] = []
        """(-rank, tie-breaker, tenant's pages), most pages first; entries with another rank are stale."""
        self._num_ranked = 0

    def __len__(self) -> int:
        return self._num_pages

    def __contains__(self, page: int) -> bool:
        return page in self._all

    def add(self, page: int) -> None:
        tenant, weight = self._index.owner(page)
        owner = self._tenants.get(tenant)
        if owner is None:
            ring = self._free_rings.pop() if self._free_rings else self._own.open()
            owner = self._tenants[tenant] = _TenantPages(tenant, ring)
        owner.weight = weight
        owner.num_pages += 1
        self._own.append(owner.ring, page)
        if owner.num_pages > owner.rank * weight * _GROWTH:
            self._rank(owner)
        self._all.append(self._ring, page)
        self._owners[page] = owner
        self._numbers[page] = self._num_added
        self._num_added += 1
        self._num_pages += 1

    def _rank(self, owner: _TenantPages) -> None:
        owner.rank = owner.num_pages / owner.weight
        self._num_ranked += 1
        heapq.heappush(self._ranking, (-owner.rank, self._num_ranked, owner))
        if len(self._ranking) > 64 + 2 * len(self._tenants):
            self._ranking = [entry for entry in self._ranking if self._is_current(*entry)]
            heapq.heapify(self._ranking)

    def _is_current(self, negative_rank: float, _number: int, owner: _TenantPages) -> bool:
        return -negative_rank == owner.rank and self._tenants.get(owner.tenant) is owner

    def discard(self, page: int) -> None:
        """Does nothing when the page is not idle."""
        owner = self._owners[page]
        if owner is not None:
            self._owners[page] = None
            self._all.remove(page)
            self._own.remove(page)
            self._num_pages -= 1
            owner.num_pages -= 1
            if not owner.num_pages:
                del self._tenants[owner.tenant]
                self._free_rings.append(owner.ring)

    def evict(self) -> int:
        """Remove a page from the index and return it; a marked one is saved to the host first.

        Raises KeyError when no page is idle.
        """
        if not self._num_pages:
            raise KeyError("no page is idle")
        page = self._all.oldest(self._ring) if len(self._tenants) < 2 else self._choose()
        self.discard(page)
        if self._index.should_offload(page):
            entry = self._index.entry(page)
            self._host_offload.save(page, entry.page_hash, entry.salt)
        self._index.remove(page)
        return page

    def _choose(self) -> int:
        oldest = self._all.oldest(self._ring)
        if self._numbers[oldest] < self._num_added - self._max_age:
            return oldest
        while True:
            owner = self._ranking[0][2]
            if not self._is_current(*self._ranking[0]):
                heapq.heappop(self._ranking)
            elif owner.num_pages * _GROWTH < owner.rank * owner.weight:
                heapq.heappop(self._ranking)
                self._rank(owner)
            else:
                return self._own.oldest(owner.ring)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the tenants' pages are the idle pages, and each tenant is ranked."""
        by_tenant = {page: owner for owner in self._tenants.values() for page in self._own.pages(owner.ring)}
        idle = list(self._all.pages(self._ring))
        owners = {page: owner for page, owner in enumerate(self._owners) if owner is not None}
        if by_tenant != owners or set(idle) != owners.keys() or len(idle) != self._num_pages:
            raise RuntimeError("the tenants' idle pages are not the idle pages")
        if any(self._numbers[older] >= self._numbers[newer] for older, newer in pairwise(idle)):
            raise RuntimeError("idle pages are not in the order in which they were added")
        ranked = {owner.tenant for rank, number, owner in self._ranking if self._is_current(rank, number, owner)}
        counts = Counter(by_tenant.values())
        if ranked != self._tenants.keys() or any(counts[owner] != owner.num_pages for owner in self._tenants.values()):
            raise RuntimeError("a tenant with idle pages is not ranked, or its pages are not counted")
