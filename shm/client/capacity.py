"""Decides whether the backend can take a request now, and estimates when a refused one may come again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.process.admission import DrainRate, Outage, bounded_retry_after_s
from penstock.shm.client.connection import BackendConnection
from penstock.shm.client.outbox import Outbox
from penstock.shm.client.queued_requests import QueuedRequests
from penstock.shm.client.streams.stream_table import OpenStreams
from penstock.shm.messages import Finish

HEARTBEAT_LIMIT_S = 2.0
MAX_WAITING_PIXEL_BYTES = 256 << 20
"""Of one tenant's requests that the backend has not received. One request alone may have more."""
_FEW_PART = 8
"""While the wait queue is full, a tenant may still send a request if it has less than an eighth of max_waiting open
here."""


class BackendUnavailable(Exception):
    """No backend is ready, and the request cannot wait for one. HTTP 503."""


class Overloaded(Exception):
    """The backend's wait queue is full, or a tenant's pictures wait. HTTP 429."""

    def __init__(self, retry_after_s: int, limit: int, reason: str = "") -> None:
        """limit is the backend's max_waiting."""
        reason = reason or f"{limit} requests or more wait in the backend, its limit"
        super().__init__(f"{reason}; retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s
        self.limit = limit


class Capacity:
    """The room for further requests, from the backend's board and this client's own queues."""

    def __init__(
        self,
        socket_path: Path,
        connection: BackendConnection,
        streams: OpenStreams,
        outbox: Outbox,
        held: QueuedRequests,
    ) -> None:
        self._socket_path = socket_path
        self._connection = connection
        self._streams = streams
        self._outbox = outbox
        self._held = held
        self._drain_rate = DrainRate()
        self.outage = Outage()

    @property
    def is_ready(self) -> bool:
        """Connected, not draining, and the heartbeat on the backend's board is younger than 2 s."""
        session = self._connection.live_session
        if session is None:
            return False
        board = session.backend_board
        return not board.draining and board.seconds_since_beat() < HEARTBEAT_LIMIT_S

    @property
    def retry_after_s(self) -> int:
        """See `BackendClient.retry_after_s`."""
        session = self._connection.live_session
        if session is None:
            return self.outage.retry_after_s
        board = session.backend_board
        if not self.is_ready:
            return bounded_retry_after_s(board.seconds_since_beat())
        return self._drain_rate.retry_after_s(board.waiting, board.requests_finished)

    def check(self, tenant: bytes, *, may_share: bool, may_hold: bool, has_begun: bool = False) -> bool:
        """Return whether a request can be sent now; otherwise it must be held.

        Raises BackendUnavailable and Overloaded.
        """
        session = self._connection.live_session
        if session is None or not self.is_ready:
            if not may_hold or not self._held.has_place(tenant):
                raise BackendUnavailable(f"no backend is ready at {self._socket_path}")
            return False
        board = session.backend_board
        self._drain_rate.note(board.requests_finished)
        max_waiting = session.model.max_waiting
        is_full = board.waiting >= max_waiting and not has_begun
        if is_full and not self._may_be_taken(tenant, max_waiting, may_share=may_share):
            raise Overloaded(self.retry_after_s, max_waiting)
        return True

    def check_pixels(self, tenant: bytes, pixels: Sequence[bytes]) -> None:
        """Raises Overloaded if the pixels of the tenant's requests that wait here would be too many."""
        if not pixels:
            return
        others = [
            each
            for stream in (*self._outbox.streams(), *self._held.streams())
            if stream.pixels and stream.finish is Finish.NONE and stream.message.tenant == tenant
            for each in stream.pixels
        ]
        sizes = {id(each): len(each) for each in (*others, *pixels)}  # pictures may share their bytes
        if sizes.keys() - set(map(id, pixels)) and sum(sizes.values()) > MAX_WAITING_PIXEL_BYTES:
            reason = f"pictures with more than {MAX_WAITING_PIXEL_BYTES} bytes of pixels, the limit, would wait"
            raise Overloaded(self.retry_after_s, MAX_WAITING_PIXEL_BYTES, reason)

    def _may_be_taken(self, tenant: bytes, max_waiting: int, *, may_share: bool) -> bool:
        """Whether a backend with a full wait queue should receive the request anyway.

        Only the backend knows whether it has an equal request, and how many places each tenant uses. False while the
        link is full: requests that will be rejected must not pile up behind it.
        """
        has_few = self._streams.num_of(tenant) < max(1, max_waiting // _FEW_PART)
        return (may_share or has_few) and not self._outbox.is_blocked
