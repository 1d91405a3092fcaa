"""A response that is generated whether or not a client listens, and those who listen to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import ClientGoneError, Exchange
from penstock.frontend.transport.sse import EventStream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from penstock.frontend.endpoints.responses.pending_response import PendingResponse
    from penstock.frontend.formats.responses import ResponsesFormat
    from penstock.frontend.transport.exchange import AsgiMessage, Receive, Send

MAX_LOG_BYTES = 8 << 20
"""The events of one response that is both streamed and in the background."""


class EventLog:
    """A response's events, each at the place of its sequence number, and those who listen to them."""

    def __init__(self, events: Sequence[bytes] = (), *, is_complete: bool = False) -> None:
        self.events = list(events)
        self.num_bytes = 0
        self._is_complete = is_complete
        self._listeners: set[asyncio.Event] = set()

    def add(self, data: bytes) -> None:
        """Whole events."""
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
        """Sends the events behind this number, those to come as they come. Raises ClientGoneError, ApiError."""
        stream, news, place = EventStream(client, tuple), asyncio.Event(), starting_after + 1
        self._listeners.add(news)
        client.watch(news.set)
        try:
            # Where the server ends, the response ends with it: its last event says so.
            while not isinstance(client.ending, ClientGoneError):
                news.clear()
                fresh = self.events[place:]
                if fresh:
                    place += len(fresh)
                    await stream.write(b"".join(fresh))
                elif self._is_complete:
                    await stream.end(b"")
                    return
                else:
                    await news.wait()
            raise client.ending
        finally:
            self._listeners.discard(news)


class _OwnExchange(Exchange):
    """The client's request once more, with somebody else for a client."""

    def __init__(self, client: Exchange, receive: Receive, send: Send, on_watch: Callable[[], None]) -> None:
        super().__init__({**client.scope, "extensions": {}}, receive, send)
        self.tenant, self.received_s, self.request_id = client.tenant, client.received_s, client.request_id
        self.key_name, self.account = client.key_name, client.account
        if self.account is not None:
            self.account.hold()
        self._on_watch = on_watch

    def watch(self, on_abort: Callable[[], None]) -> None:
        super().watch(on_abort)
        self._on_watch()


class BackgroundRun:
    """Runs over an exchange of its own, whose client it is: it takes the events, and leaves when it is cancelled."""

    def __init__(self, client: Exchange, answer: PendingResponse, *, keeps_events: bool) -> None:
        self.exchange = _OwnExchange(client, self._receive, self._send, self._note_submission)
        self.answer = answer
        self.on_submitted: Callable[[], None] | None = None
        self.is_submitted = False
        self.begun = asyncio.Event()
        """It has been submitted, or has failed before that: `error` says why."""
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self.events = EventLog() if keeps_events else None
        self._has_left = asyncio.Event()

    @property
    def response_id(self) -> str:
        return self._format.response_id

    @property
    def _format(self) -> ResponsesFormat:
        if self.answer.format is None:
            raise RuntimeError("a run has an answer once it has been submitted")
        return self.answer.format

    def snapshot(self) -> bytes:
        """The response object as it stands, as JSON."""
        return msgspec.json.encode(self._format.snapshot())

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """To its end, however it ends; `error` is what it raised."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - `conclude` and the creator tell it
            self.error = error
        finally:
            self.exchange.finish()
            self.begun.set()

    def conclude(self) -> None:
        """Tells the error, if there was one, and keeps the answer."""
        answer = self._format
        match self.error:
            case None:
                pass
            case ClientGoneError():
                answer.cancel()
            case ApiError() as error:
                self._take(answer.failure(error))
            case _:
                self._take(answer.failure(ApiError(ErrorKind.INTERNAL, "an internal error ended the answer")))
        if self.events is not None:
            self.events.end()
        self.answer.keep(answer, None if self.events is None else self.events.events)
        self.ended.set()

    def cancel(self) -> None:
        self._has_left.set()
        self.exchange.abort(ClientGoneError())

    def _note_submission(self) -> None:
        self.is_submitted = True
        if self.on_submitted is not None:
            self.on_submitted()
        self.begun.set()

    async def _receive(self) -> AsgiMessage:
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.body":
            self._take(message["body"])

    def _take(self, data: bytes) -> None:
        if self.events is None or data.startswith(b":"):
            return
        self.events.add(data)
        if self.events.num_bytes > MAX_LOG_BYTES:
            self.exchange.abort(_too_long())


def _too_long() -> ApiError:
    message = f"the events of a background response may take {MAX_LOG_BYTES} bytes; leave stream out for a longer one"
    return ApiError(ErrorKind.INVALID_VALUE, message, param="stream")
