"""One HTTP request and its answer, over the ASGI messages. Knows nothing of models."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import string
import time
from typing import TYPE_CHECKING, Any, Protocol

from penstock.frontend.transport.error_format import error_format_for
from penstock.frontend.transport.errors import ApiError, ErrorKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    Scope = dict[str, Any]
    AsgiMessage = dict[str, Any]
    Receive = Callable[[], Awaitable[AsgiMessage]]
    Send = Callable[[AsgiMessage], Awaitable[None]]
    Headers = Sequence[tuple[bytes, bytes]]

ABORT_EXTENSION = "penstock.abort"
"""In the scope's extensions: a function that drops the connection without waiting for what is still to be sent."""

_JSON_TYPE = b"application/json"
_MAX_REQUEST_ID_BYTES = 128
_REQUEST_ID_BYTES = (string.ascii_letters + string.digits + "-_.:").encode()
_SMALL_BODY_BYTES = 64 << 10
_MAX_DISCARDED_BYTES = 16 << 20
_DISCARD_TIMEOUT_S = 5.0
_LAST_DISCARD_TIMEOUT_S = 1.0
"""The same where we end the request, and somebody waits for its end."""


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to answer."""


class UsageAccount(Protocol):
    """Counts what a request uses against the limits of its API key."""

    def hold(self) -> None:
        """Count one more request in flight, until `release`."""
        ...

    def release(self) -> None: ...

    def charge(self, num_tokens: int) -> None: ...

    def headers(self) -> Headers:
        """Return OpenAI's rate limit headers."""
        ...


class Exchange:
    """Reads one body, gives one answer, and tells at once when the client goes away.

    Once `watch` has been called, its callback runs when the client goes or `abort` is called; `ending` says why.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.received_s = time.monotonic()
        self.tenant = b""
        """16 bytes that stand for the API key which let the request in; empty where no key is needed."""
        self.key_name: str | None = None
        """That key's, for logs."""
        self.account: UsageAccount | None = None
        """Where what the request uses is counted, if that key has limits."""
        self.more_headers: Headers = ()
        """Of any answer."""
        self.status: int | None = None
        """Of the answer; None until its status line has been sent."""
        self.ending: Exception | None = None
        self.sending_since_s = 0.0
        """When the send that now waits for the client began; 0 while none does."""
        self.last_sent_s = self.received_s
        self.idle_action: Callable[[], Awaitable[None]] | None = None
        """What to do when nothing has been sent for a while: an event stream writes a comment."""
        self.query: bytes = scope.get("query_string", b"")
        self._error_format = error_format_for(self.path)
        self._headers: Headers = scope["headers"]
        self._drop_connection: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT_EXTENSION)
        self._receive = receive
        self._send = send
        self.is_reading = False
        """Whether the body is being read."""
        self._body_read = self.header(b"content-length") in (None, b"0") and self.header(b"transfer-encoding") is None
        self._watcher: asyncio.Task[None] | None = None
        self._on_abort: Callable[[], None] | None = None
        self.request_id = self._client_request_id() or secrets.token_hex(12)

    def header(self, name: bytes) -> bytes | None:
        """The header's value; several of the same name count as a wrong one and are joined."""
        values = [value for key, value in self._headers if key == name]
        return b", ".join(values) if values else None

    def _client_request_id(self) -> str | None:
        value = self.header(b"x-request-id")
        if value and len(value) <= _MAX_REQUEST_ID_BYTES and not value.translate(None, _REQUEST_ID_BYTES):
            return value.decode("ascii")
        return None

    async def read_body(self, *, max_bytes: int, timeout_s: float) -> bytes:
        """Raises ApiError beyond the limits, ClientGoneError when the client leaves before the body is complete, and
        what `abort` was given."""
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        self.is_reading = True
        try:
            async with self._limited(timeout_s):
                while not self._body_read:
                    part = await self._receive_part()
                    num_bytes += len(part)
                    if num_bytes > max_bytes:
                        raise _too_large(max_bytes)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(ErrorKind.TOO_SLOW, f"the body was not complete after {timeout_s:g} s") from None
        finally:
            self.is_reading = False
        return b"".join(parts)

    async def wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        """Returns when the event is set or time is up. Raises what ended the exchange before. For after the body."""
        with contextlib.suppress(TimeoutError):
            async with self._limited(timeout_s):
                self._watch_for_disconnect()
                await event.wait()

    @contextlib.asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """What is awaited within is given up when the client leaves. Raises what ended the exchange. For after the
        body, and before `watch`."""
        async with self._limited(None):
            self._watch_for_disconnect()
            yield

    @contextlib.asynccontextmanager
    async def _limited(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Raises TimeoutError when time is up, and what `abort` was given at once."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._set_on_abort(lambda: None if limit.expired() else limit.reschedule(0.0))
                yield
        except TimeoutError:
            if self.ending is None:
                raise
        finally:
            self._on_abort = None
        if self.ending is not None:
            raise self.ending

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def watch(self, on_abort: Callable[[], None]) -> None:
        """From here on a client that leaves is noticed. Call it when the body has been read."""
        self._watch_for_disconnect()
        self._set_on_abort(on_abort)

    def _watch_for_disconnect(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._wait_for_disconnect())

    def _set_on_abort(self, on_abort: Callable[[], None]) -> None:
        self._on_abort = on_abort
        if self.ending is not None:
            on_abort()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.abort(ClientGoneError())

    def abort(self, ending: Exception) -> None:
        """Ends what runs for this request, for a reason of ours or the client's. The first reason stays."""
        if self.ending is None:
            self.ending = ending
            if self._on_abort is not None:
                self._on_abort()

    def drop(self) -> None:
        """The client does not read: closes the connection and ends what runs for it."""
        self.abort(ClientGoneError())
        if self._drop_connection is not None:
            self._drop_connection()

    def charge(self, num_tokens: int) -> None:
        if self.account is not None:
            self.account.charge(num_tokens)

    def finish(self) -> None:
        """Nothing more will be read or sent."""
        if self.account is not None:
            self.account.release()
            self.account = None
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def started(self) -> bool:
        """Whether the status line has been sent."""
        return self.status is not None

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        request_id = self.request_id.encode()
        ids = [(name, request_id) for name in self._error_format.request_id_headers]
        limits = () if self.account is None else self.account.headers()
        sent_headers = [*headers, *limits, *self.more_headers, *ids]
        await self._transmit({"type": "http.response.start", "status": status, "headers": sent_headers})

    async def send(self, body: bytes, *, more: bool) -> None:
        """Returns when the connection has taken it, which a client that does not read can delay for ever: see drop."""
        await self._transmit({"type": "http.response.body", "body": body, "more_body": more})

    async def _transmit(self, message: AsgiMessage) -> None:
        self.sending_since_s = self.sending_since_s or time.monotonic()
        await self._send(message)
        self.last_sent_s = time.monotonic()
        self.sending_since_s = 0.0

    async def respond(
        self, status: int, body: bytes, headers: Headers = (), *, content_type: bytes = _JSON_TYPE
    ) -> None:
        """A whole answer."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, ((b"content-type", content_type), length, *headers))
        await self.send(body, more=False)

    async def respond_error(self, error: ApiError) -> None:
        """The error object with its status, whatever of the body has been read."""
        status, body = self._error_format.describe(error, self.request_id)
        if self._body_read or self._rest_is_small():
            await self.respond(status, body, error.headers)
            return
        length = (b"content-length", b"%d" % len(body))
        headers = ((b"content-type", _JSON_TYPE), length, (b"connection", b"close"), *error.headers)
        await self.start(status, headers)
        await self.send(body, more=True)
        # Closing a connection with unread bytes resets it, and the client would lose the answer.
        if self.header(b"expect") is None:
            await self._discard_body()
        await self.send(b"", more=False)

    def _rest_is_small(self) -> bool:
        """Whether the server may throw the rest of the body away as it comes, and the connection go on."""
        declared = self.header(b"content-length")
        return declared is not None and int(declared) <= _SMALL_BODY_BYTES and self.header(b"expect") is None

    async def _discard_body(self) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(_DISCARD_TIMEOUT_S if self.ending is None else _LAST_DISCARD_TIMEOUT_S):
                while not self._body_read and num_bytes < _MAX_DISCARDED_BYTES:
                    num_bytes += len(await self._receive_part())
        except (TimeoutError, ClientGoneError):
            return


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorKind.BODY_TOO_LARGE, f"the body is larger than the limit of {max_bytes} bytes")
