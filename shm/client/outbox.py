"""Messages to the backend that wait because the link is down or full, or the arena has no free slot."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TypeVar

import msgspec

from penstock.shm.client.session import Session
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.pooled import PooledStream
from penstock.shm.client.streams.stream_table import OpenStreams
from penstock.shm.memory.arena import ArenaFull
from penstock.shm.messages import (
    MAX_INLINE_PROMPT_TOKENS,
    MAX_POOL_BATCH,
    BufferRef,
    FailureCode,
    Finish,
    Generate,
    Keep,
    Pool,
    PromptHeader,
)

PromptT = TypeVar("PromptT", bound=PromptHeader)
_MAX_TIMEOUT_MS = 1 << 31
_MAX_AT_ONCE = 128
"""More would hold the event loop for longer than a few milliseconds."""


class Outbox:
    """Streams to submit and request ids to cancel, in order."""

    def __init__(self, streams: OpenStreams) -> None:
        self._streams = streams
        self._items: deque[OpenStream | tuple[int, Keep]] = deque()
        self._aside: deque[OpenStream] = deque()
        """Streams whose pictures find no room, in order. Others pass them: room comes when an answer ends."""
        self.is_blocked = False
        """The link or the arena did not take the first message."""

    def __len__(self) -> int:
        return len(self._items) + len(self._aside)

    def streams(self) -> Iterator[OpenStream]:
        """Those that wait to be sent, and some that have ended."""
        yield from self._aside
        yield from (item for item in self._items if not isinstance(item, tuple))

    def submit(self, stream: OpenStream) -> None:
        stream.is_queued = True
        self._items.append(stream)

    def cancel(self, request_id: int, keep: Keep = Keep.NOTHING) -> None:
        """Call only for a request that has been sent; a stream that ends while it is queued is skipped."""
        self._items.append((request_id, keep))

    def forget(self, streams: Collection[OpenStream]) -> None:
        """Drop streams that another client submits."""
        self._items = deque(item for item in self._items if isinstance(item, tuple) or item not in streams)
        self._aside = deque(stream for stream in self._aside if stream not in streams)

    def clear(self) -> None:
        self._items.clear()
        self._aside.clear()
        self.is_blocked = False

    def send(self, session: Session) -> bool:
        """Send until the link takes no more, about _MAX_AT_ONCE items at most. Return whether some are left to send at
        once."""
        num_left = _MAX_AT_ONCE
        while num_left > 0 and self._find_next(session):
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

    def _find_next(self, session: Session) -> bool:
        """Whether an item is due. The first that has no room for its pictures is set aside."""
        if self._aside and not self._lacks_room(session, self._aside[0]):
            self._items.appendleft(self._aside.popleft())
            return True
        while self._items and not isinstance(item := self._items[0], tuple) and self._must_wait(session, item):
            self._aside.append(item)
            self._items.popleft()
        return bool(self._items)

    def _must_wait(self, session: Session, stream: OpenStream) -> bool:
        """Whether a stream has no room, or others with pictures wait already: small ones could pass them for ever."""
        lacks_room = self._lacks_room(session, stream)
        return lacks_room or bool(self._aside and stream.pixels and stream.finish is Finish.NONE)

    def _lacks_room(self, session: Session, stream: OpenStream) -> bool:
        if (
            not stream.pixels
            or not isinstance(stream.message, Generate)
            or stream.finish is not Finish.NONE
            or _has_expired(stream)
        ):
            return False
        if session.has_room(stream.message, stream.pixels):
            return False
        if session.has_room(stream.message, stream.pixels, when_empty=True):
            return True
        num_bytes = sum(map(len, stream.pixels))
        stream.note_failure(FailureCode.BAD_PICTURE, text=f"the pictures have {num_bytes} bytes of pixels: too many")
        self._streams.finish(stream, Finish.REJECTED)
        return False

    def _send_next(self, session: Session) -> int:
        """Send the first item, together with streams behind it that fit its message. Return the number of items that
        are done, 0 to try again later."""
        item = self._items[0]
        if isinstance(item, tuple):
            return int(session.send_cancel(*item))
        if together := self._first_pools():
            return len(together) if session.send_pools(together) else 0
        return int(item.finish is not Finish.NONE or self._send_stream(session, item))

    def _first_pools(self) -> list[tuple[Pool, array[int]]]:
        """Return the inputs at the beginning that fit one message, if there are several."""
        inputs: list[tuple[Pool, array[int]]] = []
        for item in islice(self._items, MAX_POOL_BATCH):
            if not isinstance(item, PooledStream) or not _fits_with_others(item):
                break
            inputs.append((_timed(item.message, item), item.tokens))
        return inputs if len(inputs) > 1 else []

    def _send_stream(self, session: Session, stream: OpenStream) -> bool:
        """False to try again later; True when the stream is sent or has ended."""
        if _has_expired(stream):
            self._streams.finish(stream, Finish.EXPIRED)
            return True
        if not isinstance(stream.message, PromptHeader):
            return session.send(stream.message)
        message = _timed(stream.message, stream)
        if isinstance(message.tokens, BufferRef):
            return session.send(message)
        if not session.can_carry(len(stream.tokens)):
            limit = session.model.max_context_tokens
            self._streams.fail(stream, FailureCode.CONTEXT_TOO_LONG, Finish.REJECTED, limit)
            return True
        try:
            return session.send_prompt(message, stream.tokens, stream.pixels)
        except ArenaFull:
            return False


def _fits_with_others(stream: PooledStream) -> bool:
    """Whether the stream is to be sent and its message is small: MAX_POOL_BATCH of them fit one."""
    return (
        stream.finish is Finish.NONE
        and not isinstance(stream.message.tokens, BufferRef)
        and len(stream.tokens) <= MAX_INLINE_PROMPT_TOKENS
        and not _has_expired(stream)
    )


def _has_expired(stream: OpenStream) -> bool:
    return stream.deadline_s is not None and stream.deadline_s <= time.monotonic()


def _timed(message: PromptT, stream: OpenStream) -> PromptT:
    """The message with its times: the milliseconds that the stream has left, at least 1, and when it was admitted."""
    timeout_ms = 0
    if stream.deadline_s is not None:
        timeout_ms = max(1, min(_MAX_TIMEOUT_MS, math.ceil(1000 * (stream.deadline_s - time.monotonic()))))
    return msgspec.structs.replace(message, timeout_ms=timeout_ms, admitted_ns=stream.admitted_ns)
