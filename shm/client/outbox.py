"""Messages to the backend that wait because the link is down or full, or the arena has no free slot."""

from __future__ import annotations

import math
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from penstock.shm.memory.arena import ArenaFull
from penstock.shm.messages import MAX_INLINE_PROMPT_TOKENS, MAX_SUBMITS, BufferRef, FailureCode, Finish, Keep

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.shm.client.open_stream import OpenStream
    from penstock.shm.client.open_streams import OpenStreams
    from penstock.shm.client.session import Session

_MAX_TIMEOUT_MS = 1 << 31
_MAX_AT_ONCE = 128
"""More would hold the event loop for longer than a few milliseconds."""


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
        """Send until the link takes no more, about _MAX_AT_ONCE items at most. Return whether some are left to send at
        once."""
        num_left = _MAX_AT_ONCE
        while self._items and num_left > 0:
            num_done = self._send_next(session)
            self.is_blocked = not num_done
            if self.is_blocked:
                return False
            num_left -= num_done
            for _ in range(num_done):
                if not isinstance(item := self._items.popleft(), tuple):
                    item.is_queued = False
        self.is_blocked = False
        return bool(self._items)

    def _send_next(self, session: Session) -> int:
        """Send the first item, together with streams behind it that fit its message. Return the number of items that
        are done, 0 to try again later."""
        item = self._items[0]
        if isinstance(item, tuple):
            return int(session.send_cancel(*item))
        together = self._first_streams()
        if len(together) > 1:
            submits = [(stream.submit, stream.tokens, _timeout_ms(stream)) for stream in together]
            return len(submits) if session.send_submits(submits) else 0
        return int(item.finish is not Finish.NONE or self._send_stream(session, item))

    def _first_streams(self) -> list[OpenStream]:
        """Return the streams at the beginning that fit one message."""
        streams: list[OpenStream] = []
        for item in islice(self._items, MAX_SUBMITS):
            if isinstance(item, tuple) or not _fits_with_others(item):
                break
            streams.append(item)
        return streams

    def _send_stream(self, session: Session, stream: OpenStream) -> bool:
        """False to try again later; True when the stream is sent or has ended."""
        if _has_expired(stream):
            self._streams.finish(stream, Finish.EXPIRED)
            return True
        timeout_ms = _timeout_ms(stream)
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


def _fits_with_others(stream: OpenStream) -> bool:
    """Whether the stream is to be sent and its message is small: MAX_SUBMITS of them fit one."""
    return (
        stream.submit.pooled is not None
        and stream.finish is Finish.NONE
        and not isinstance(stream.submit.tokens, BufferRef)
        and len(stream.tokens) <= MAX_INLINE_PROMPT_TOKENS
        and not _has_expired(stream)
    )


def _has_expired(stream: OpenStream) -> bool:
    return stream.deadline_s is not None and stream.deadline_s <= time.monotonic()


def _timeout_ms(stream: OpenStream) -> int:
    """Milliseconds that a stream has left, at least 1; 0 for one without a deadline."""
    if stream.deadline_s is None:
        return 0
    return max(1, min(_MAX_TIMEOUT_MS, math.ceil(1000 * (stream.deadline_s - time.monotonic()))))
