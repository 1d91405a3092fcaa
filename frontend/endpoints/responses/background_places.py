"""Limits how many responses may run in the background of one worker and how much they may store, shared among tenants.

A running response is never evicted from the store, so these bounds, not the database's, limit one tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, retry_later
from penstock.process.admission import HARD_BOUND, DrainRate, TenantPlaces

MAX_IN_BACKGROUND = 64
"""Responses of one worker that run in the background at a time."""
MAX_STREAMED_IN_BACKGROUND = 8
"""Background responses at a time whose events are kept; each may take MAX_LOG_BYTES."""
MAX_LOG_BYTES = 8 << 20
"""Events of one response that is both streamed and in the background."""
MAX_ANSWER_BYTES = 512 << 10
"""Bytes of the answer's object that are stored while the answer grows."""
MAX_BACKGROUND_BYTES = 96 << 20
"""Bytes that the background responses of one worker may store until they end."""
HARD_BOUND_BYTES = HARD_BOUND * MAX_BACKGROUND_BYTES
"""The same limit for all, including tenants with less than their share."""


@dataclass(frozen=True, slots=True)
class BackgroundClaim:
    """Space that one response takes until it ends."""

    payer: bytes
    num_bytes: int
    is_streamed: bool

    @classmethod
    def of(cls, payer: bytes, num_input_bytes: int, *, is_streamed: bool) -> BackgroundClaim:
        """num_input_bytes is the stored size of the request."""
        num_bytes = num_input_bytes + MAX_ANSWER_BYTES + (MAX_LOG_BYTES if is_streamed else 0)
        return cls(payer, num_bytes, is_streamed)


class BackgroundPlaces:
    """The claims of one worker's background responses."""

    def __init__(self) -> None:
        self._runs = TenantPlaces(MAX_IN_BACKGROUND)
        self._streams = TenantPlaces(MAX_STREAMED_IN_BACKGROUND)
        self._bytes = TenantPlaces(MAX_BACKGROUND_BYTES)
        self._num_ended = 0
        self._end_rate = DrainRate()

    def take(self, claim: BackgroundClaim) -> None:
        """Raises ApiError when the payer has no place for it."""
        runs, streams, stored = self._runs, self._streams, self._bytes
        if claim.num_bytes > stored.limit:
            invalid("background", f"this response may store {claim.num_bytes} bytes; the limit is {stored.limit}")
        if not runs.has(claim.payer):
            raise self._full(f"{runs.num_taken} responses run in the background already, the limit is {runs.limit}")
        if claim.is_streamed and not streams.has(claim.payer):
            raise self._full(
                f"{streams.num_taken} responses are streamed in the background already, the limit is {streams.limit}",
                " or leave stream out",
            )
        if not stored.has(claim.payer, claim.num_bytes):
            raise self._full(
                f"this response may store {claim.num_bytes} bytes and those in the background {stored.num_taken}, "
                f"the limit is {stored.limit}"
            )
        self._change(claim, TenantPlaces.take)

    def release(self, claim: BackgroundClaim) -> None:
        self._change(claim, TenantPlaces.release)
        self._num_ended += 1
        self._end_rate.note(self._num_ended)

    def _change(self, claim: BackgroundClaim, change: Callable[[TenantPlaces, bytes, int], None]) -> None:
        change(self._runs, claim.payer, 1)
        change(self._bytes, claim.payer, claim.num_bytes)
        if claim.is_streamed:
            change(self._streams, claim.payer, 1)

    def _full(self, what: str, instead: str = "") -> ApiError:
        """Return the error; its retry time is when a response should end, at the recent rate."""
        retry_after_s = self._end_rate.retry_after_s(1, self._num_ended)
        return retry_later(ErrorKind.OVERLOADED, f"{what}; retry later{instead}", retry_after_s)


def is_too_long(num_event_bytes: int) -> bool:
    return num_event_bytes > MAX_LOG_BYTES


def too_long() -> ApiError:
    """Return the error for a response whose events take too much space."""
    message = (
        f"stream: the events of a background response may take {MAX_LOG_BYTES} bytes; leave stream out for a longer one"
    )
    return ApiError(ErrorKind.INVALID_VALUE, message, param="stream")
