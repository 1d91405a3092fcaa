"""One HTTP request and its answer, over ASGI messages. It knows nothing of models.

How a client's hang-up is noticed is in `disconnect`, which Exchange inherits. A lingering answer can be read
again over another connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import string
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.frontend.telemetry.request_log import ReportSpans
from penstock.frontend.transport.asgi import (
    ABORT_EXTENSION,
    PART_EXTENSION,
    AsgiMessage,
    Headers,
    PartWriter,
    Receive,
    Scope,
    Send,
)
from penstock.frontend.transport.disconnect import Abortable, ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, error_format_for, shorten
from penstock.frontend.transport.incomplete import IncompleteBodies, client_network
from penstock.shm.client import BackendClient

logger = logging.getLogger("penstock.app")


@dataclass(slots=True)
class LingeringAnswer:
    """An answer to read again. It belongs to one exchange.

    The same path, body, id, time and seed give the same events.
    """

    linger_s: int
    path: str
    """The path of the endpoint that answers."""
    body: bytes
    begun: tuple[str, int] | None = None
    """The answer's id, which names the stream, and the second since 1970 when it began; None until it begins."""
    seed: int | None = None
    """The seed for a body without one; None until the answer begins."""
    num_received: int = 0
    """Events that the client has received over earlier connections."""
    backend: BackendClient | None = None
    """The backend that has kept the stream; None for a new one."""

    @property
    def is_resumed(self) -> bool:
        return self.backend is not None


_JSON_TYPE = b"application/json"
_MAX_REQUEST_ID_BYTES = 128
_REQUEST_ID_BYTES = (string.ascii_letters + string.digits + "-_.:").encode()
_SMALL_BODY_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_MAX_DISCARDED_BYTES = 16 << 20
_DISCARD_TIMEOUT_S = 5.0
_LAST_DISCARD_TIMEOUT_S = 1.0
"""The same when the server ends the request and a drain waits for it."""


@dataclass(frozen=True, slots=True)
class PlannedUse:
    """The most that a request will use; known once its prompts are tokens."""

    num_sequences: int
    """Choices over all prompts."""
    sequences_field: str
    """The body's field that asks for this number of sequences."""
    prompt_tokens: int
    answer_tokens: int
    """Over all choices: the number that the request allows, or an assumption if it gives none."""
    tokens_field: str
    """The body's field that asks for this number of tokens."""
    is_stated: bool
    """Whether the request itself limits its answer."""


class UsageClaim(Protocol):
    """A request's part of its API key's limits. It counts one request from the start."""

    def share(self) -> None:
        """Add a holder: another exchange that continues the request and releases the claim too."""

    def reserve(self, planned: PlannedUse) -> None:
        """Claim what the request will use. Raises ApiError."""

    def grow_to(self, num_tokens: int) -> None:
        """Count tokens that are used beyond the reserved ones at once."""

    def settle(self, num_tokens: int) -> None:
        """Replace the reserved tokens by those that were used."""

    def release(self) -> None: ...

    def headers(self) -> Headers:
        """Return OpenAI's rate limit headers."""


class Exchange(Abortable):
    """Reads one request's body and sends one answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, incomplete: IncompleteBodies | None = None) -> None:
        """The exchange is in incomplete while it reads a body."""
        super().__init__(receive)
        # Request
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.received_s = time.monotonic()
        self._incomplete = incomplete
        self._discarding: asyncio.Timeout | None = None
        """Set while the rest of the body is dropped."""
        self._headers: Headers = scope["headers"]
        self._body_read = self.header(b"content-length") in (None, b"0") and self.header(b"transfer-encoding") is None
        self.unread_body = b""
        """A body that was read only to find the endpoint; `read_body` returns it again."""
        self.request_id = self._client_request_id() or secrets.token_hex(12)
        # Sender
        self.tenant = b""
        """16 bytes that identify the API key of the request; empty when no key is needed."""
        self.payer = b""
        """The tenant that the backend's scheduler charges: the key's or, without keys, the client's address."""
        self.weight = 1.0
        """The payer's share of the device in proportion to the others'."""
        self.is_admin = False
        """The API key of the request may load and unload models."""
        self.key_name: str | None = None
        """The API key's name, for logs."""
        self.report_spans: ReportSpans | None = None
        """None without tracing."""
        self.lingering: LingeringAnswer | None = None
        """The answer can be read again over another connection, or this connection continues one."""
        self.claim: UsageClaim | None = None
        """The request's part of its key's limits, if the key has some."""
        # Answer
        self.more_headers: Headers = ()
        """Headers that any answer to this request carries."""
        self.status: int | None = None
        """The answer's status; None until its status line has been sent."""
        self.sending_since_s = 0.0
        """When the send that is waiting for the client began; 0 while none waits."""
        self.last_sent_s = self.received_s
        self.is_event_stream = False
        """An answer that has started consists of events."""
        self.idle_action: Callable[[], Awaitable[None]] | None = None
        """Called when nothing has been sent for a while: an event stream writes a comment."""
        self.waits_for_backend: Callable[[], bool] = lambda: False
        """Whether the answer's backend is away, such as during a restart."""
        self.count_status: Callable[[int], None] | None = None
        """Called with the status when the exchange has ended; None leaves it to the application."""
        self.at_end: list[Callable[[], None]] = []
        """Called soon after the exchange has ended: work that the client need not wait for."""
        self.error_format = error_format_for(self.path, self.method)
        """Two APIs may have the same path; then the body decides."""
        self._send = send
        extensions = scope.get("extensions", {})
        self._drop_connection: Callable[[], None] | None = extensions.get(ABORT_EXTENSION)
        parts: PartWriter | None = extensions.get(PART_EXTENSION)
        self._write_part = None if parts is None else parts.write_part
        self.takes_part: Callable[[], bool] = (lambda: False) if parts is None else parts.takes_part
        """Whether `write_part` may be called in this turn of the event loop."""

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
            raise body_too_large(max_bytes)
        parts: list[bytes] = [self.unread_body]
        self.unread_body = b""
        num_bytes = 0
        try:
            async with self._cancelled_on_abort(timeout_s):
                with self._reading():
                    while not self._body_read:
                        part = await self._receive_part()
                        num_bytes += len(part)
                        if num_bytes > max_bytes:
                            raise body_too_large(max_bytes)
                        parts.append(part)
                        if self._incomplete is not None:
                            self._incomplete.hold(self, num_bytes, time.monotonic())
        except TimeoutError:
            message = f"the body was not complete after the limit of {timeout_s:g} s"
            raise ApiError(ErrorKind.TOO_SLOW, message) from None
        return b"".join(parts)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Count the exchange among those whose bodies are incomplete. It may displace another, and be displaced."""
        if self._incomplete is None or self._body_read:
            yield
            return
        self._incomplete.add(self, client_network(self.scope.get("client")), time.monotonic())
        try:
            yield
        finally:
            self._incomplete.discard(self)

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def displace(self) -> None:
        """Stop reading the body: another request needs its place."""
        if self._discarding is not None:
            if not self._discarding.expired():  # otherwise it ends in the task's next turn
                self._discarding.reschedule(0.0)
        else:
            message = "the body was not complete when another request needed the place of this one"
            self.abort(ApiError(ErrorKind.TOO_SLOW, message))

    @property
    def started(self) -> bool:
        """Whether the status line has been sent."""
        return self.status is not None

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        request_id = self.request_id.encode()
        ids = [(name, request_id) for name in self.error_format.request_id_headers]
        limits = () if self.claim is None else self.claim.headers()
        sent_headers = [*headers, *limits, *self.more_headers, *ids]
        await self._transmit({"type": "http.response.start", "status": status, "headers": sent_headers})

    async def send(self, body: bytes, *, more: bool) -> None:
        """Send a part of the answer. Returns when the connection has taken it.

        A client that does not read can delay that forever: see `OpenExchanges.sweep`.
        """
        await self._transmit({"type": "http.response.body", "body": body, "more_body": more})

    def write_part(self, body: bytes) -> None:
        """Send a part of an answer at once, without a coroutine."""
        if self._write_part is not None and body:
            self._write_part(body)
            self.last_sent_s = time.monotonic()

    async def _transmit(self, message: AsgiMessage) -> None:
        self.sending_since_s = self.sending_since_s or time.monotonic()
        await self._send(message)
        self.last_sent_s = time.monotonic()
        self.sending_since_s = 0.0

    async def respond(
        self, status: int, body: bytes, headers: Headers = (), *, content_type: bytes = _JSON_TYPE
    ) -> None:
        """Send a whole answer."""
        await self.respond_in_parts(status, [body], headers, content_type=content_type)

    async def respond_in_parts(
        self, status: int, parts: Sequence[bytes], headers: Headers = (), *, content_type: bytes = _JSON_TYPE
    ) -> None:
        """Send a whole answer that is in several parts, for answers too large to be joined on the event loop."""
        length = (b"content-length", b"%d" % sum(map(len, parts)))
        await self.start(status, ((b"content-type", content_type), length, *headers))
        # A large answer in pieces: the connection copies each, and takes the next when the client has read enough.
        unsent: list[bytes] = []
        num_unsent = 0
        for part in parts:
            if unsent and num_unsent + len(part) > _PIECE_BYTES:
                await self.send(b"".join(unsent), more=True)
                unsent, num_unsent = [], 0
            start = 0
            while not unsent and len(part) - start > _PIECE_BYTES:
                await self.send(part[start : start + _PIECE_BYTES], more=True)
                start += _PIECE_BYTES
            unsent.append(part[start:] if start else part)
            num_unsent += len(unsent[-1])
        await self.send(b"".join(unsent), more=False)

    async def respond_error(self, error: ApiError) -> None:
        """Send the error object with its status, however much of the body has been read."""
        status, body = self.error_format.describe(error, self.request_id)
        is_slow = error.kind is ErrorKind.TOO_SLOW
        if self._body_read or (self._outlives_rest() and not is_slow):
            await self.respond(status, body, error.headers)
            return
        length = (b"content-length", b"%d" % len(body))
        headers = ((b"content-type", _JSON_TYPE), length, (b"connection", b"close"), *error.headers)
        await self.start(status, headers)
        await self.send(body, more=True)
        # Closing a connection with unread bytes resets it, and the client would lose the answer.
        if self.header(b"expect") is None and not is_slow:
            await self._discard_body()
        await self.send(b"", more=False)

    def unforeseen(self) -> ApiError:
        """Log the exception that is being handled, a bug of ours. Return what the client learns: only that there was
        one, and where the log has it."""
        logger.exception("%s %s of request %s failed", self.method, shorten(self.path), self.request_id)
        return ApiError(ErrorKind.INTERNAL, f"an internal error occurred in request {self.request_id}")

    async def end_events(self, error: ApiError) -> None:
        """End an event stream that has started with an error event."""
        self.idle_action = None
        _, body = self.error_format.describe(error, self.request_id)
        form = self.error_format.stream
        await self.send(self.error_format.event_name + form.head + body + form.tail, more=False)

    def _outlives_rest(self) -> bool:
        """Whether the connection stays open and drops the rest of the body, which is small, as it arrives."""
        declared = self.header(b"content-length")
        if declared is None or int(declared) > _SMALL_BODY_BYTES or self.header(b"expect") is not None:
            return False
        return self.scope["http_version"] != "1.0" and b"close" not in (self.header(b"connection") or b"").lower()

    async def _discard_body(self) -> None:
        num_bytes = 0
        timeout_s = _DISCARD_TIMEOUT_S if self.ending is None else _LAST_DISCARD_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s) as self._discarding:
                with self._reading():
                    while not self._body_read and num_bytes < _MAX_DISCARDED_BYTES:
                        num_bytes += len(await self._receive_part())
        except (TimeoutError, ClientGoneError):
            return
        finally:
            self._discarding = None

    def drop(self) -> None:
        """Close the connection of a client that does not read, and end the work for it."""
        self.abort(ClientGoneError())
        if self._drop_connection is not None:
            self._drop_connection()

    def finish(self) -> None:
        """Release the exchange's resources. Nothing more is read or sent."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None
        self._stop_watching()
        for action in self.at_end:  # in the loop's next turn: uvloop writes the answer at the end of this one
            asyncio.get_running_loop().call_soon(action)


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(ErrorKind.BODY_TOO_LARGE, f"the body is larger than the limit of {max_bytes} bytes")
