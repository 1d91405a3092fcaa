"""Reasons for which the client refuses a request."""

from __future__ import annotations


class BackendUnavailable(Exception):
    """No backend is ready, and the request cannot wait for one. HTTP 503."""


class Overloaded(Exception):
    """The backend's wait queue is full. HTTP 429."""

    def __init__(self, retry_after_s: int, limit: int) -> None:
        """limit is the backend's max_waiting."""
        super().__init__(f"{limit} requests or more wait in the backend, its limit; retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s
        self.limit = limit
