"""Holds new requests while no backend is ready: a bounded number, shared fairly among tenants, for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection

from penstock.process.admission import TenantPlaces
from penstock.shm.client.outbox import Outbox
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.stream_table import OpenStreams
from penstock.shm.messages import FailureCode, Finish

_POLL_S = 0.05


class QueuedRequests:
    """Streams that no backend has received, oldest first.

    While it holds any, it checks every 0.05 s whether the backend is ready, because the heartbeat is in shared memory.
    It drops ended streams at each check, and when their places are needed.
    """

    def __init__(
        self,
        streams: OpenStreams,
        outbox: Outbox,
        limit: int,
        timeout_s: float,
        *,
        is_ready: Callable[[], bool],
        send: Callable[[], None],
    ) -> None:
        """A single tenant may have limit streams here, all tenants together twice as many: see `tenant_places`. 0 holds
        none.

        After timeout_s a stream fails. send empties the outbox.
        """
        self._streams = streams
        self._outbox = outbox
        self._places = TenantPlaces(limit)
        self._timeout_s = timeout_s
        self._is_ready = is_ready
        self._send = send
        self._held: deque[tuple[float, OpenStream]] = deque()
        self._poll: asyncio.TimerHandle | None = None

    @property
    def is_enabled(self) -> bool:
        return self._places.limit > 0

    def has_place(self, tenant: bytes) -> bool:
        """Whether a new stream of this tenant may be held."""
        if not self._places.has(tenant):
            self._drop_ended()
        return self._places.has(tenant)

    def streams(self) -> set[OpenStream]:
        """The held streams, and some that have ended."""
        return {stream for _, stream in self._held}

    def hold(self, stream: OpenStream) -> None:
        """Hold the stream until a backend is ready.

        A new stream needs a place; one that an ending backend has refused does not.
        """
        stream.is_queued = True
        self._places.take(stream.message.tenant)
        self._held.append((time.monotonic() + self._timeout_s, stream))
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._look)

    def forget(self, streams: Collection[OpenStream]) -> None:
        """Drop streams that another client submits. Their number may be large: this looks at each held stream once."""
        self._keep(lambda stream: stream not in streams)

    def clear(self) -> None:
        """Call when something else submits the open streams, or has ended them."""
        while self._held:
            self._take_oldest()
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def _look(self) -> None:
        self._poll = None
        if self._is_ready():
            self._release()
            return
        now_s = time.monotonic()
        while self._held and self._held[0][0] <= now_s:
            stream = self._take_oldest()
            if stream.finish is Finish.NONE:
                self._streams.fail(stream, FailureCode.UNAVAILABLE)
        self._drop_ended()
        if self._held:
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._look)

    def _release(self) -> None:
        while self._held:
            stream = self._take_oldest()
            if stream.finish is Finish.NONE:
                stream.mark_admitted()
                self._outbox.submit(stream)
        self._send()

    def _take_oldest(self) -> OpenStream:
        _, stream = self._held.popleft()
        self._places.release(stream.message.tenant)
        return stream

    def _drop_ended(self) -> None:
        self._keep(lambda stream: stream.finish is Finish.NONE)

    def _keep(self, is_kept: Callable[[OpenStream], bool]) -> None:
        kept: deque[tuple[float, OpenStream]] = deque()
        for entry in self._held:
            if is_kept(entry[1]):
                kept.append(entry)
            else:
                self._places.release(entry[1].message.tenant)
        self._held = kept
