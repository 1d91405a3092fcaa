"""The writer of one answer as server-sent events."""

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
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
)


class EventStream:
    """Sends the headers with the first event, so that what fails before it still has a status of its own.

    A stream that is silent for a while gets a comment, headers first, by which load balancers know that it lives.
    """

    def __init__(self, exchange: Exchange, headers: Callable[[], Headers]) -> None:
        """headers are sent besides the stream's own; asked for when they go."""
        self._exchange = exchange
        self._headers = headers
        self._unsent = b""
        self._turn = asyncio.Lock()
        exchange.idle_action = self._keep_alive

    async def write(self, events: bytes) -> None:
        """One or more whole events."""
        if not self._exchange.started:
            await self._exchange.start(200, (*_HEADERS, *self._headers()))
        await self._exchange.send(events, more=True)

    async def write_together(self, events: bytes) -> None:
        """As `write`, in one piece with what other tasks write in this turn of the loop. Returns when all is sent."""
        self._unsent += events
        await asyncio.sleep(0)
        async with self._turn:
            if self._unsent:
                events, self._unsent = self._unsent, b""
                await self.write(events)

    async def end(self, events: bytes) -> None:
        """The last events."""
        self._exchange.idle_action = None
        unsent, self._unsent = self._unsent, b""
        await self.write(unsent + events)
        await self._exchange.send(b"", more=False)

    async def _keep_alive(self) -> None:
        await self.write(_KEEP_ALIVE)
