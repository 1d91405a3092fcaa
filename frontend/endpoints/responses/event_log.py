"""The events of one response, which several clients may follow from any position: in memory while it runs here, else in
the store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.frontend.endpoints.responses.stored_events import split_events
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.sse import EventStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.frontend.endpoints.responses.store import ResponseStore
    from penstock.frontend.transport.exchange import Exchange

_LOOKS_EVERY_S = 0.25
"""How often a follower looks whether another worker has stored new events."""


class EventLog:
    """A response's events. The index of an event is its sequence number."""

    def __init__(self, earlier: Sequence[bytes] = ()) -> None:
        """earlier are the events of a run that was broken off. This run begins again, and must repeat them."""
        self.events = list(earlier)
        self.num_bytes = sum(map(len, earlier))
        self.num_to_repeat = len(earlier)
        """Earlier events that this run has not repeated yet."""
        self._is_complete = False
        self._listeners: set[asyncio.Event] = set()

    def add(self, data: bytes) -> bool:
        """Append one or more whole events. Return False, and append none, if they differ from the earlier ones."""
        if self._is_complete:
            return True
        fresh = split_events(data)
        repeated = fresh[: self.num_to_repeat]
        if repeated:
            first = len(self.events) - self.num_to_repeat
            if repeated != self.events[first : first + len(repeated)]:
                return False
            self.num_to_repeat -= len(repeated)
        added = fresh[len(repeated) :]
        self.num_bytes += sum(map(len, added))
        self.events += added
        self._wake()
        return True

    def end(self) -> None:
        self._is_complete = True
        self._wake()

    def break_off(self, last: bytes) -> None:
        """End with this event, though not all earlier ones have been repeated."""
        self.events += split_events(last)
        self.end()

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


async def follow_stored(client: Exchange, store: ResponseStore, response_id: str, starting_after: int) -> None:
    """Send the events after this number of a response that is stored, new ones as its worker stores them.

    Raises ClientGoneError, ApiError.
    """
    stream, never, position = EventStream(client, tuple), asyncio.Event(), starting_after + 1
    while True:
        fresh = await store.events(client.tenant, response_id, position)
        if fresh is not None and fresh.events:
            position += len(fresh.events)
            await stream.write(b"".join(fresh.events))
            await client.wait_for(never, 0.0)
        elif fresh is None or not fresh.is_running:
            await stream.end(b"")
            return
        else:
            await client.wait_for(never, _LOOKS_EVERY_S)
