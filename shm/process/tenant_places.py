"""Shares a bounded number of places among tenants: a flood of one of them leaves places to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

HARD_BOUND = 2
"""All tenants together take at most this many times the limit."""


def has_place(num_taken: int, limit: int, num_own: int, share: float) -> bool:
    """Whether a tenant may take one more place.

    num_taken are taken, num_own of them by this tenant. share is the tenant's part of the `limit` places, from 0 to 1.

    While fewer than limit are taken, any tenant may. Beyond the limit, a tenant may only if it has less than its share,
    and less than the places left up to the hard bound. So places remain for the tenants that come after it (the dynamic
    threshold of Choudhury and Hahne, 1998).
    """
    if num_taken < limit:
        return True
    num_left = HARD_BOUND * limit - num_taken
    return num_left > 0 and num_own < max(1, min(int(share * limit), num_left))


def is_over_share(num_of: Mapping[bytes, int], tenant: bytes, limit: int, num: int = 1) -> bool:
    """Whether the tenant may not take num more places. Tenants have equal shares.

    num_of counts the places of each tenant that has some. A tenant that asks for more than limit is over its share.
    """
    num_tenants = len(num_of) + (tenant not in num_of)
    num_more = num - 1
    return not has_place(sum(num_of.values()) + num_more, limit, num_of.get(tenant, 0) + num_more, 1 / num_tenants)


class TenantPlaces:
    """Counts the places that tenants have taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Places that a single tenant may take."""
        self.num_taken = 0
        self._num_of: dict[bytes, int] = {}
        """Places of each tenant that has some."""

    def has(self, tenant: bytes, num: int = 1) -> bool:
        """Whether the tenant may take num more places."""
        return self.num_taken + num <= self.limit or not is_over_share(self._num_of, tenant, self.limit, num)

    def take(self, tenant: bytes, num: int = 1) -> None:
        """Take places, even beyond the limit; `has` tells whether the tenant should."""
        self.num_taken += num
        self._num_of[tenant] = self._num_of.get(tenant, 0) + num

    def release(self, tenant: bytes, num: int = 1) -> None:
        self.num_taken -= num
        self._num_of[tenant] -= num
        if not self._num_of[tenant]:
            del self._num_of[tenant]
