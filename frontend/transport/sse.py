"""Writes one answer as a stream of events: server-sent events, or the lines of an API that has these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.exchange import Exchange

_RESTARTING = b": restarting\n\n"
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
)


def split_events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


class EventNumbers:
    """Gives each event of a stream its id, from 0, and leaves out the events that the client has received before."""

    def __init__(self, num_received: int = 0) -> None:
        self._num_received = num_received
        self._next = 0

    def number(self, events: bytes) -> bytes:
        """Return the events that the client has not received."""
        numbered = []
        for event in split_events(events):
            if self._next >= self._num_received:
                numbered.append(b"id: %d\n%b" % (self._next, event))
            self._next += 1
        return b"".join(numbered)


class EventStream:
    """Sends the headers with the first event, so that an error before it still has its own status.

    A stream that is silent for a while sends a comment, after the headers, so that load balancers keep it open; not
    one whose API has no comments. The comment says whether its backend is away.
    """

    def __init__(self, exchange: Exchange, headers: Callable[[], Headers], numbers: EventNumbers | None = None) -> None:
        """headers is called when the answer starts, and adds to the stream's own. Without numbers events have no id."""
        self._exchange = exchange
        self._form = exchange.error_format.stream
        self._numbers = numbers
        self._headers = headers
        self._unsent = b""
        self._write_lock = asyncio.Lock()
        exchange.idle_action = self._keep_alive if self._form.keep_alive else None

    async def write(self, events: bytes) -> None:
        """Write one or more whole events."""
        await self._write(self._numbered(events))

    def _numbered(self, events: bytes) -> bytes:
        return events if self._numbers is None else self._numbers.number(events)

    async def _write(self, events: bytes) -> None:
        if not self._exchange.started:
            self._exchange.is_event_stream = True
            kind = (b"content-type", self._form.content_type)
            await self._exchange.start(200, (kind, *_HEADERS, *self._headers()))
        if events:  # otherwise the client has received them
            await self._exchange.send(events, more=True)

    async def write_together(self, events: bytes) -> None:
        """Write, in one piece with what other tasks write in this turn of the event loop. Returns when all is sent."""
        self._unsent += events
        await asyncio.sleep(0)
        async with self._write_lock:
            if self._unsent:
                events, self._unsent = self._unsent, b""
                await self.write(events)

    async def end(self, events: bytes, *, is_failure: bool = False) -> None:
        """Write the last events. Failure events have no id: a later reader may skip them."""
        self._exchange.idle_action = None
        unsent, self._unsent = self._unsent, b""
        await self._write(self._numbered(unsent) + (events if is_failure else self._numbered(events)))
        await self._exchange.send(b"", more=False)

    async def _keep_alive(self) -> None:
        if self._exchange.idle_action is not None:  # otherwise the stream has ended since this was due
            await self._write(_RESTARTING if self._exchange.waits_for_backend() else self._form.keep_alive)
