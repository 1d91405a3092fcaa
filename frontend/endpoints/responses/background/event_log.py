"""The events of one response, which several clients may follow from any position.

They are in memory while the response runs here, else in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.frontend.endpoints.responses.storage.store import ResponseStore
from penstock.frontend.formats.openai_chunks import DONE
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shutting_down
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.open_exchanges import OpenExchanges
from penstock.frontend.transport.sse import EventStream, split_events

_LOOKS_EVERY_S = 0.25
"""How often a follower checks whether another worker has stored new events."""
_MOST_LOOKS_IN_VAIN = 12
"""How often a follower in a draining worker checks, without result, whether another worker takes the response over."""


class EventLog:
    """A response's events. The index of an event is its sequence number."""

    def __init__(self, earlier: Sequence[bytes] = ()) -> None:
        """earlier are the events of a run that was interrupted. This run starts again and must repeat them."""
        self.events = list(earlier)
        self.num_bytes = sum(map(len, earlier))
        self.num_to_repeat = len(earlier)
        """Earlier events that this run has not repeated yet."""
        self.goes_on_elsewhere = False
        """Whether the run has ended and the response has not: further events will be in the store."""
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

    def end(self, *, goes_on_elsewhere: bool = False) -> None:
        self._is_complete, self.goes_on_elsewhere = True, goes_on_elsewhere
        self._wake()

    def break_off(self, last: bytes) -> None:
        """End with this event, even if not all earlier ones have been repeated."""
        self.events += split_events(last)
        self.end()

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.set()

    async def send(self, client: Exchange, stream: EventStream, position: int) -> int:
        """Send the events from this position on, and new ones as they come, until the run ends.

        Return the position after the last. Raises ClientGoneError.
        """
        news = asyncio.Event()
        self._listeners.add(news)
        client.on_disconnect(news.set)
        try:
            # A server that shuts down ends the run too, and its last event says so, or it goes on elsewhere.
            while not isinstance(client.ending, ClientGoneError):
                news.clear()
                fresh = self.events[position:]
                if fresh:
                    position += len(fresh)
                    await stream.write(b"".join(fresh))
                elif self._is_complete:
                    return position
                else:
                    await news.wait()
            raise client.ending
        finally:
            self._listeners.discard(news)


class Followers:
    """Sends events to clients, from memory or from the store."""

    def __init__(self, store: ResponseStore, open_exchanges: OpenExchanges) -> None:
        self._store = store
        self._open_exchanges = open_exchanges

    async def follow(self, client: Exchange, response_id: str, log: EventLog | None, starting_after: int) -> None:
        """Send the events after this number, and new ones as they come.

        log has the events of a response that runs here. Raises ClientGoneError, ApiError.
        """
        stream, position = EventStream(client, tuple), starting_after + 1
        if log is not None:
            position = await log.send(client, stream, position)
        if log is None or log.goes_on_elsewhere:
            await self._send_stored(client, stream, response_id, position)
        await stream.end(DONE)

    async def _send_stored(self, client: Exchange, stream: EventStream, response_id: str, position: int) -> None:
        """Send the events from this position on, new ones as their worker stores them."""
        never, num_looks_in_vain = asyncio.Event(), 0
        try:
            while (found := await self._store.events(client.tenant, response_id, position)) is not None:
                if found.events:
                    position += len(found.events)
                    await stream.write(b"".join(found.events))
                elif not found.is_running:
                    return
                if found.is_waiting and self._open_exchanges.is_draining:
                    num_looks_in_vain += 1
                    if num_looks_in_vain > _MOST_LOOKS_IN_VAIN:
                        raise shutting_down()
                await client.wait_for(never, 0.0 if found.events else _LOOKS_EVERY_S)
        except ApiError as error:
            if error.kind is ErrorKind.SHUTTING_DOWN:
                raise _read_on(response_id, position) from None
            raise


def _read_on(response_id: str, position: int) -> ApiError:
    after = f"&starting_after={position - 1}" if position else ""
    message = f"the server is shutting down; read on with GET /v1/responses/{response_id}?stream=true{after}"
    return retry_later(ErrorKind.SHUTTING_DOWN, message, 1)
