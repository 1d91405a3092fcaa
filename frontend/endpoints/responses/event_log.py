"""The events of one response, which several clients may follow from any position."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.sse import EventStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.frontend.transport.exchange import Exchange


class EventLog:
    """A response's events. The index of an event is its sequence number."""

    def __init__(self, events: Sequence[bytes] = (), *, is_complete: bool = False) -> None:
        self.events = list(events)
        self.num_bytes = 0
        self._is_complete = is_complete
        self._listeners: set[asyncio.Event] = set()

    def add(self, data: bytes) -> None:
        """Append one or more whole events."""
        self.num_bytes += len(data)
        self.events += (event + b"\n\n" for event in data.split(b"\n\n") if event)
        self._wake()

    def end(self) -> None:
        self._is_complete = True
        self._wake()

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.set()

    async def follow(self, client: Exchange, starting_after: int) -> None:
        """Send the events after this number to a client, new ones as they come. Raises ClientGoneError, ApiError."""
        stream, news, position = EventStream(client, tuple), asyncio.Event(), starting_after + 1
        self._listeners.add(news)
        client.on_disconnect(news.set)
        try:
            # A server that shuts down ends the response too, and its last event says so.
            while not isinstance(client.ending, ClientGoneError):
                news.clear()
                fresh = self.events[position:]
                if fresh:
                    position += len(fresh)
                    await stream.write(b"".join(fresh))
                elif self._is_complete:
                    await stream.end(b"")
                    return
                else:
                    await news.wait()
            raise client.ending
        finally:
            self._listeners.discard(news)
