"""Bounded places: how tenants share them, and when to come again when they are taken.

A flood of one tenant leaves places to the others. When to retry is estimated from queues and measured rates.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

HARD_BOUND = 2
"""All tenants together take at most this many times the limit."""
MAX_RETRY_AFTER_S = 60
_SAMPLE_INTERVAL_S = 0.5
_RATE_WINDOW_S = 10.0


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


def bounded_retry_after_s(seconds: float) -> int:
    """Round up to whole seconds from 1 to MAX_RETRY_AFTER_S."""
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))


class DrainRate:
    """The rate at which a count of finished requests grew in the last ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # time, finished until then

    def note(self, num_finished: int) -> None:
        """Remember the count. Cheap enough to call with every event. A count that falls discards the older ones."""
        now_s = self._clock()
        samples = self._samples
        if samples and num_finished < samples[-1][1]:
            samples.clear()
        while samples and now_s - samples[0][0] > _RATE_WINDOW_S:
            samples.popleft()
        if not samples or now_s - samples[-1][0] >= _SAMPLE_INTERVAL_S:
            samples.append((now_s, num_finished))

    def retry_after_s(self, num_waiting: int, num_finished: int) -> int:
        """Return the seconds in which num_waiting finish at the noted rate, 1 to MAX_RETRY_AFTER_S.

        If none has finished, return the seconds since the oldest note: it takes at least as long again.
        """
        self.note(num_finished)
        then_s, finished_then = self._samples[0]
        age_s, num_new = self._clock() - then_s, num_finished - finished_then
        return bounded_retry_after_s(num_waiting * age_s / num_new if num_new else age_s)


class Outage:
    """Estimates how long an outage will still last from the duration of the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """An outage begins now."""
        self._clock = clock
        self._began_s: float | None = clock()
        self._last_duration_s = 0.0

    def begin(self) -> None:
        if self._began_s is None:
            self._began_s = self._clock()

    def end(self) -> None:
        if self._began_s is not None:
            self._last_duration_s = self._clock() - self._began_s
            self._began_s = None

    @property
    def retry_after_s(self) -> int:
        """The rest of the last outage's duration, 1 to MAX_RETRY_AFTER_S; after that, as long again as this one has
        lasted."""
        age_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        rest_s = self._last_duration_s - age_s
        return bounded_retry_after_s(rest_s if rest_s > 0 else age_s)
