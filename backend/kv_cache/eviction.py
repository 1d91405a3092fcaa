"""Eviction: chooses the idle page to give up when the pool needs one, and whether its content is saved to the host."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


class _TenantPages:
    """One tenant's idle pages, least recently held first."""

    __slots__ = ("pages", "rank", "tenant", "weight")

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.pages: dict[int, None] = {}
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
        self._num_added = 0
        self._pages: OrderedDict[int, tuple[int, _TenantPages]] = OrderedDict()
        """Page → (number of pages added before it, its tenant's pages), least recently held first."""
        self._tenants: dict[bytes, _TenantPages] = {}
        """Tenants that have idle pages."""
        self._ranking: list[tuple[float, int, _TenantPages]] = []
        """(-rank, tie-breaker, tenant's pages), most pages first; entries with another rank are stale."""
        self._num_ranked = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def add(self, page: int) -> None:
        entry = self._index.entry(page)
        owner = self._tenants.get(entry.tenant)
        if owner is None:
            owner = self._tenants[entry.tenant] = _TenantPages(entry.tenant)
        owner.weight = entry.weight
        owner.pages[page] = None
        if len(owner.pages) > owner.rank * owner.weight * _GROWTH:
            self._rank(owner)
        self._pages[page] = self._num_added, owner
        self._num_added += 1

    def _rank(self, owner: _TenantPages) -> None:
        owner.rank = len(owner.pages) / owner.weight
        self._num_ranked += 1
        heapq.heappush(self._ranking, (-owner.rank, self._num_ranked, owner))
        if len(self._ranking) > 64 + 2 * len(self._tenants):
            self._ranking = [entry for entry in self._ranking if self._is_current(*entry)]
            heapq.heapify(self._ranking)

    def _is_current(self, negative_rank: float, _number: int, owner: _TenantPages) -> bool:
        return -negative_rank == owner.rank and self._tenants.get(owner.tenant) is owner

    def discard(self, page: int) -> None:
        """Does nothing when the page is not idle."""
        if page in self._pages:
            _, owner = self._pages.pop(page)
            del owner.pages[page]
            if not owner.pages:
                del self._tenants[owner.tenant]

    def evict(self) -> int:
        """Remove a page from the index and return it; a marked one is saved to the host first.

        Raises KeyError when no page is idle.
        """
        page = next(iter(self._pages)) if len(self._tenants) < 2 else self._choose()
        self.discard(page)
        entry = self._index.entry(page)
        if entry.should_offload:
            self._host_offload.save(page, entry.page_hash, entry.salt)
        self._index.remove(page)
        return page

    def _choose(self) -> int:
        oldest, (number, _) = next(iter(self._pages.items()))
        if number < self._num_added - self._max_age:
            return oldest
        while True:
            owner = self._ranking[0][2]
            if not self._is_current(*self._ranking[0]):
                heapq.heappop(self._ranking)
            elif len(owner.pages) * _GROWTH < owner.rank * owner.weight:
                heapq.heappop(self._ranking)
                self._rank(owner)
            else:
                return next(iter(owner.pages))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the tenants' pages are the idle pages, and each tenant is ranked."""
        by_tenant = {page: owner for owner in self._tenants.values() for page in owner.pages}
        if by_tenant != {page: owner for page, (_, owner) in self._pages.items()}:
            raise RuntimeError("the tenants' idle pages are not the idle pages")
        ranked = {owner.tenant for rank, number, owner in self._ranking if self._is_current(rank, number, owner)}
        if ranked != self._tenants.keys() or any(not owner.pages for owner in self._tenants.values()):
            raise RuntimeError("a tenant with idle pages is not ranked")
