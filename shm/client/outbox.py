"""Messages to the backend that wait because the link is down or full, or the arena has no free slot."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.shm.memory.arena import ArenaFull
from penstock.shm.messages import BufferRef, FailureCode, Finish, Keep

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.shm.client.open_stream import OpenStream
    from penstock.shm.client.open_streams import OpenStreams
    from penstock.shm.client.session import Session

_MAX_TIMEOUT_MS = 1 << 31
_MAX_AT_ONCE = 128
"""More messages would hold the event loop for longer than a few milliseconds."""


class Outbox:
    """Streams to submit and request ids to cancel, in order."""

    def __init__(self, streams: OpenStreams) -> None:
        self._streams = streams
        self._items: deque[OpenStream | tuple[int, Keep]] = deque()
        self.is_blocked = False
        """The link or the arena did not take the first message."""

    def __len__(self) -> int:
        return len(self._items)

    def submit(self, stream: OpenStream) -> None:
        stream.is_queued = True
        self._items.append(stream)

    def cancel(self, request_id: int, keep: Keep = Keep.NOTHING) -> None:
        """Call only for a request that has been sent; a stream that ends while it is queued is skipped."""
        self._items.append((request_id, keep))

    def forget(self, streams: Collection[OpenStream]) -> None:
        """Drop streams that another client submits."""
        self._items = deque(item for item in self._items if isinstance(item, tuple) or item not in streams)

    def clear(self) -> None:
        self._items.clear()
        self.is_blocked = False

    def send(self, session: Session) -> bool:
        """Send until the link takes no more, at most _MAX_AT_ONCE messages. Return whether some are left to send at
        once."""
        for _ in range(_MAX_AT_ONCE):
            if not self._items:
                self.is_blocked = False
                return False
            item = self._items[0]
            if isinstance(item, tuple):
                self.is_blocked = not session.send_cancel(*item)
            elif item.finish is Finish.NONE and not self._send_stream(session, item):
                self.is_blocked = True
            else:
                self.is_blocked = item.is_queued = False
            if self.is_blocked:
                return False
            self._items.popleft()
        return bool(self._items)

    def _send_stream(self, session: Session, stream: OpenStream) -> bool:
        """False to try again later; True when the stream is sent or has ended."""
        timeout_ms = 0
        if stream.deadline_s is not None:
            left_s = stream.deadline_s - time.monotonic()
            if left_s <= 0.0:
                self._streams.finish(stream, Finish.EXPIRED)
                return True
            timeout_ms = min(_MAX_TIMEOUT_MS, math.ceil(1000 * left_s))
        if isinstance(stream.submit.tokens, BufferRef):
            return session.send_with_buffer(stream.submit, timeout_ms)
        if not session.can_carry(len(stream.tokens)):
            limit = session.model.max_context_tokens
            self._streams.fail(stream, FailureCode.CONTEXT_TOO_LONG, Finish.REJECTED, limit)
            return True
        try:
            return session.send_submit(stream.submit, stream.tokens, timeout_ms)
        except ArenaFull:
            return False
