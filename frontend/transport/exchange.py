"""One HTTP request and its answer, over ASGI messages. It knows nothing of models.

How a client's hang-up is noticed is in `disconnect`, which Exchange inherits.
"""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from typing import TYPE_CHECKING, Protocol

from penstock.frontend.transport.asgi import ABORT_EXTENSION
from penstock.frontend.transport.disconnect import Abortable, ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, error_format_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.frontend.transport.asgi import AsgiMessage, Headers, Receive, Scope, Send

_JSON_TYPE = b"application/json"
_MAX_REQUEST_ID_BYTES = 128
_REQUEST_ID_BYTES = (string.ascii_letters + string.digits + "-_.:").encode()
_SMALL_BODY_BYTES = 64 << 10
_MAX_DISCARDED_BYTES = 16 << 20
_DISCARD_TIMEOUT_S = 5.0
_LAST_DISCARD_TIMEOUT_S = 1.0
"""The same when the server ends the request and a drain waits for it."""


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


class Exchange(Abortable):
    """Reads one request's body and sends one answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(receive)
        # Request
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.received_s = time.monotonic()
        self.is_reading = False
        """Whether the body is being read."""
        self._headers: Headers = scope["headers"]
        self._body_read = self.header(b"content-length") in (None, b"0") and self.header(b"transfer-encoding") is None
        self.request_id = self._client_request_id() or secrets.token_hex(12)
        # Sender
        self.tenant = b""
        """16 bytes that identify the API key of the request; empty when no key is needed."""
        self.key_name: str | None = None
        """The API key's name, for logs."""
        self.account: UsageAccount | None = None
        """Counts what the request uses, if its key has limits."""
        # Answer
        self.more_headers: Headers = ()
        """Headers that any answer to this request carries."""
        self.status: int | None = None
        """The answer's status; None until its status line has been sent."""
        self.sending_since_s = 0.0
        """When the send that is waiting for the client began; 0 while none waits."""
        self.last_sent_s = self.received_s
        self.idle_action: Callable[[], Awaitable[None]] | None = None
        """Called when nothing has been sent for a while: an event stream writes a comment."""
        self._error_format = error_format_for(self.path)
        self._send = send
        self._drop_connection: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT_EXTENSION)

    def header(self, name: bytes) -> bytes | None:
        """Return the header's value. Several of the same name are joined, which makes most of them invalid."""
        values = [value for key, value in self._headers if key == name]
        return b", ".join(values) if values else None

    def _client_request_id(self) -> str | None:
        value = self.header(b"x-request-id")
        if value and len(value) <= _MAX_REQUEST_ID_BYTES and not value.translate(None, _REQUEST_ID_BYTES):
            return value.decode("ascii")
        return None

    async def read_body(self, *, max_bytes: int, timeout_s: float) -> bytes:
        """Return the whole body.

        Raises ApiError beyond the limits, ClientGoneError when the client hangs up before the body is complete, and
        `ending`.
        """
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        self.is_reading = True
        try:
            async with self._cancelled_on_abort(timeout_s):
                while not self._body_read:
                    part = await self._receive_part()
                    num_bytes += len(part)
                    if num_bytes > max_bytes:
                        raise _too_large(max_bytes)
                    parts.append(part)
        except TimeoutError:
            message = f"the body was not complete after the limit of {timeout_s:g} s"
            raise ApiError(ErrorKind.TOO_SLOW, message) from None
        finally:
            self.is_reading = False
        return b"".join(parts)

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

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
        """Send a part of the answer. Returns when the connection has taken it.

        A client that does not read can delay that forever: see `OpenExchanges.sweep`.
        """
        await self._transmit({"type": "http.response.body", "body": body, "more_body": more})

    async def _transmit(self, message: AsgiMessage) -> None:
        self.sending_since_s = self.sending_since_s or time.monotonic()
        await self._send(message)
        self.last_sent_s = time.monotonic()
        self.sending_since_s = 0.0

    async def respond(
        self, status: int, body: bytes, headers: Headers = (), *, content_type: bytes = _JSON_TYPE
    ) -> None:
        """Send a whole answer."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, ((b"content-type", content_type), length, *headers))
        await self.send(body, more=False)

    async def respond_error(self, error: ApiError) -> None:
        """Send the error object with its status, however much of the body has been read."""
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
        """Whether the server may discard the rest of the body as it arrives and keep the connection."""
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

    def charge(self, num_tokens: int) -> None:
        """Count tokens against the key's limits, if it has any."""
        if self.account is not None:
            self.account.charge(num_tokens)

    def drop(self) -> None:
        """Close the connection of a client that does not read, and end the work for it."""
        self.abort(ClientGoneError())
        if self._drop_connection is not None:
            self._drop_connection()

    def finish(self) -> None:
        """Release what the exchange holds. Nothing more is read or sent."""
        if self.account is not None:
            self.account.release()
            self.account = None
        self._stop_watching()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorKind.BODY_TOO_LARGE, f"the body is larger than the limit of {max_bytes} bytes")
