"""Refusal of a request while the backend's wait queue is full, with an estimate of when to retry."""

from __future__ import annotations

import math
import time

_MAX_RETRY_AFTER_S = 60
_RATE_WINDOW_S = 10.0


class Overloaded(Exception):
    """The backend's wait queue is full. HTTP 429."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the backend's wait queue is full; retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class DrainRate:
    """How fast the wait queue drains, from the backend's count of finished requests."""

    def __init__(self) -> None:
        self._sample = (0.0, 0)  # monotonic time, finished requests

    def retry_after_s(self, num_waiting: int, num_finished: int) -> int:
        """Seconds in which the queue drains at the recent rate: 1 to 60, and 1 while the rate is unknown."""
        now_s = time.monotonic()
        then_s, finished_then = self._sample
        age_s, num_new = now_s - then_s, num_finished - finished_then
        if age_s > _RATE_WINDOW_S or num_new < 0:
            self._sample = (now_s, num_finished)
        if num_new <= 0 or age_s > 2 * _RATE_WINDOW_S:
            return 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_waiting * age_s / num_new)))
