"""A streaming HTTP/1.1 client with little between the socket and the clock.

The generator shares the cores with the server that it measures, so each microsecond that it spends on a token falsifies
the figure. It is therefore a bare asyncio Protocol over httptools: bytes get their time stamp as they arrive and are
parsed in the same call, without a task switch per event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_IDLE_S = 1.0
"""A connection that was idle for longer is not reused: the server may be about to close it."""

OnEvent = Callable[[float, bytes], None]
"""Called with time.perf_counter() at arrival and the payload of one `data:` event."""


class ConnectionBroken(Exception):
    """The connection failed, or ended before the answer did."""


class StaleConnection(ConnectionBroken):
    """A connection that had been used before ended without a byte of the answer: the server no longer kept it open."""


class HungUp(Exception):
    """This client closed the connection on purpose."""


@dataclass(slots=True)
class HttpReply:
    """An answer. Header names are in lower case; the body of an event stream is not kept."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class ClientConnection(asyncio.Protocol):
    """One keep-alive connection; at most one exchange at a time."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.reusable = True
        self.is_reused = False
        self._transport: asyncio.Transport | None = None
        # State of one exchange: set by `exchange`, read by the callbacks of the parser.
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[HttpReply] | None = None
        self._reply = HttpReply()
        self._on_event: OnEvent | None = None
        self._is_event_stream = False
        self._has_begun = False
        self._arrived_s = 0.0
        self._partial = b""

    async def exchange(self, request: bytes, on_event: OnEvent | None = None) -> HttpReply:
        """Send one request and wait for the whole answer. Raises StaleConnection, ConnectionBroken, HungUp."""
        self._has_begun = False
        if self._transport is None or self._transport.is_closing():
            raise self._broken("the connection is closed")
        self._reply, self._on_event, self._partial = HttpReply(), on_event, b""
        self._parser = httptools.HttpResponseParser(self)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None
            self.idle_since_s = time.perf_counter()

    def send(self, data: bytes) -> None:
        """Send a part of a request, to which no answer is expected."""
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self, lasts_s: float) -> None:
        """Read nothing for a while, as a slow client does."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.pause_reading()

        def resume() -> None:
            if not transport.is_closing():
                transport.resume_reading()

        asyncio.get_running_loop().call_later(lasts_s, resume)

    def hang_up(self) -> None:
        """Close the connection as a client that goes away does. A waiting `exchange` raises HungUp."""
        self._end(HungUp())
        self.close()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _broken(self, reason: str) -> ConnectionBroken:
        is_stale = self.is_reused and not self._has_begun
        return StaleConnection(reason) if is_stale else ConnectionBroken(reason)

    def _end(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport has the methods, but not the class

    def data_received(self, data: bytes) -> None:
        self._arrived_s = time.perf_counter()
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionBroken(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(self._broken(str(exc) if exc else "the server closed the connection too early"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._is_event_stream = self._reply.headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        if not self._is_event_stream or self._on_event is None:
            self._reply.body += body
            return
        pending = self._partial + body
        if b"\r" in pending:
            pending = pending.replace(b"\r\n", b"\n")
        *events, self._partial = pending.split(b"\n\n")
        for event in events:
            if event.startswith(b"event:"):
                event = event.partition(b"\n")[2]
            if event.startswith(b"data:"):
                self._on_event(self._arrived_s, event[5:].strip())

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._reply)


class HttpClient:
    """Requests to one server. Opens a connection when none is idle."""

    def __init__(self, url: str, api_key: str | None = None, max_idle_s: float = MAX_IDLE_S) -> None:
        """url is http://HOST[:PORT][/v1]. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f'"{url}" is not an address of the form http://host:port')
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._common_headers = f"Host: {parts.netloc}\r\n{authorization}"
        self._max_idle_s = max_idle_s
        self._idle: list[ClientConnection] = []

    async def connect(self) -> ClientConnection:
        """Return an idle connection or a new one. Raises ConnectionBroken."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.perf_counter() - connection.idle_since_s < self._max_idle_s:
                connection.is_reused = True
                return connection
            connection.close()
        return await self._open()

    async def _open(self) -> ClientConnection:
        """Raises ConnectionBroken."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(ClientConnection, self._host, self._port)
        except OSError as error:
            raise ConnectionBroken(f"no connection to {self._host}:{self._port}: {error}") from None
        return connection

    def give_back(self, connection: ClientConnection) -> None:
        if connection.reusable:
            self._idle.append(connection)

    def encode_post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._common_headers}{more}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def ask(self, exchange: Callable[[ClientConnection], Awaitable[HttpReply]]) -> HttpReply:
        """Run one exchange on an idle connection or a new one. Raises ConnectionBroken, HungUp.

        Some servers close kept connections without notice. If that happens before a byte of the answer has arrived, the
        exchange runs again on a new connection. RFC 9112, section 9.3.1, permits that for requests that are safe to
        repeat; those of this generator change nothing in a server.
        """
        connection = await self.connect()
        try:
            reply = await exchange(connection)
        except StaleConnection:
            connection = await self._open()
            reply = await exchange(connection)
        self.give_back(connection)
        return reply

    def encode_get(self, path: str) -> bytes:
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._common_headers}\r\n".encode()

    async def get(self, path: str) -> HttpReply:
        """Raises ConnectionBroken."""
        request = self.encode_get(path)
        return await self.ask(lambda connection: connection.exchange(request))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
