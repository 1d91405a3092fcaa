"""New requests wait here while no backend is ready: a bounded number of them, each for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.shm.messages import FailureCode, Finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.shm.client.open_streams import OpenStreams
    from penstock.shm.client.outbox import Outbox
    from penstock.shm.client.stream import TokenStream

_POLL_S = 0.05


class HeldStreams:
    """Streams that no backend has received, oldest first. A stream that ends here is dropped at its turn.

    While it holds any, it looks every 0.05 s whether the backend is ready: the heartbeat is in shared memory.
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
        """limit counts streams; 0 holds none. After timeout_s a stream fails. send empties the outbox."""
        self._streams = streams
        self._outbox = outbox
        self._limit = limit
        self._timeout_s = timeout_s
        self._is_ready = is_ready
        self._send = send
        self._held: deque[tuple[float, TokenStream]] = deque()
        self._poll: asyncio.TimerHandle | None = None

    @property
    def is_enabled(self) -> bool:
        return self._limit > 0

    @property
    def is_full(self) -> bool:
        if len(self._held) >= self._limit:
            self._drop_ended()
        return len(self._held) >= self._limit

    def streams(self) -> set[TokenStream]:
        """The streams that it holds, and some that have ended."""
        return {stream for _, stream in self._held}

    def hold(self, stream: TokenStream) -> None:
        """Hold the stream until a backend is ready. Streams that a backend has refused because it ends may exceed the
        limit."""
        stream.is_queued = True
        self._held.append((time.monotonic() + self._timeout_s, stream))
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._look)

    def clear(self) -> None:
        """Another part submits the open streams, or ends them."""
        self._held.clear()
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
            _, stream = self._held.popleft()
            if stream.finish is Finish.NONE:
                self._streams.fail(stream, FailureCode.UNAVAILABLE)
        self._drop_ended()
        if self._held:
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._look)

    def _release(self) -> None:
        for _, stream in self._held:
            if stream.finish is Finish.NONE:
                stream.mark_admitted()
                self._outbox.submit(stream)
        self._held.clear()
        self._send()

    def _drop_ended(self) -> None:
        self._held = deque(entry for entry in self._held if entry[1].finish is Finish.NONE)
