"""Writes one answer as server-sent events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.transport.asgi import Headers
    from penstock.frontend.transport.exchange import Exchange

_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
)


class EventStream:
    """Sends the headers with the first event, so that an error before it still has its own status.

    A stream that is silent for a while sends a comment, after the headers, so that load balancers keep it open.
    """

    def __init__(self, exchange: Exchange, headers: Callable[[], Headers]) -> None:
        """headers is called when the answer starts, and adds to the stream's own."""
        self._exchange = exchange
        self._headers = headers
        self._unsent = b""
        self._write_lock = asyncio.Lock()
        exchange.idle_action = self._keep_alive

    async def write(self, events: bytes) -> None:
        """Write one or more whole events."""
        if not self._exchange.started:
            self._exchange.is_event_stream = True
            await self._exchange.start(200, (*_HEADERS, *self._headers()))
        await self._exchange.send(events, more=True)

    async def write_together(self, events: bytes) -> None:
        """Write, in one piece with what other tasks write in this turn of the event loop. Returns when all is sent."""
        self._unsent += events
        await asyncio.sleep(0)
        async with self._write_lock:
            if self._unsent:
                events, self._unsent = self._unsent, b""
                await self.write(events)

    async def end(self, events: bytes) -> None:
        """Write the last events."""
        self._exchange.idle_action = None
        unsent, self._unsent = self._unsent, b""
        await self.write(unsent + events)
        await self._exchange.send(b"", more=False)

    async def _keep_alive(self) -> None:
        await self.write(_KEEP_ALIVE)
