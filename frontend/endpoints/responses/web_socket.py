"""The Responses API over a WebSocket: each `response.create` message is answered like a streamed POST /v1/responses.

Requests of one connection run one after another. The next request can use the connection's latest response, even if it
is not stored (`LatestResponses`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from penstock.frontend.endpoints.responses.storage.store import StoredResponse
from penstock.frontend.transport.asgi import ABORT_EXTENSION, WORKING_EXTENSION, AsgiMessage, Receive, Scope, Send
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, error_body, invalid, shorten
from penstock.frontend.transport.exchange import Exchange, body_too_large

Answer = Callable[[Exchange, "Turn"], Awaitable[None]]

PATH = "/v1/responses"
MAX_QUEUED = 8
_CREATE = "response.create"
_MAX_STREAM_ID = 64
_NOT_OF_A_TURN = (b"content-length", b"transfer-encoding", b"content-type", b"connection", b"upgrade", b"x-request-id")
_ERROR_HEAD = b'{"error":'
_FAILED_HEAD = b'{"type":"response.failed"'


class LatestResponses:
    """The latest response of each connection of a worker, stored or not. Beyond max_bytes the oldest are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._of: dict[object, StoredResponse] = {}

    def put(self, connection: object, response: StoredResponse) -> None:
        self.drop(connection)
        self._of[connection] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._of)))

    def drop(self, connection: object) -> None:
        response = self._of.pop(connection, None)
        if response is not None:
            self._num_bytes -= response.num_bytes

    def get(self, connection: object) -> StoredResponse | None:
        return self._of.get(connection)


@dataclass(slots=True)
class Turn:
    """One request of a connection."""

    body: bytes
    """A body of POST /v1/responses."""
    generates: bool
    """False: the items are only kept, for a later request to continue."""
    connection: object
    latest: LatestResponses
    is_continuation: bool
    stream_id: msgspec.Raw | None = None

    def find(self, response_id: str) -> StoredResponse | None:
        """Return the connection's latest response if it has this id."""
        response = self.latest.get(self.connection)
        return response if response is not None and response.response_id == response_id else None

    def keep(self, response: StoredResponse) -> None:
        self.latest.put(self.connection, response)


class _Envelope(msgspec.Struct):
    """The fields of a message that POST /v1/responses lacks, or that have another meaning there."""

    type: str | None = None
    generate: bool | None = None
    stream_id: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None


_envelope_decoder = msgspec.json.Decoder(_Envelope)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ResponseSocket:
    """One connection, after its upgrade has been admitted."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        answer: Answer,
        latest: LatestResponses,
        *,
        max_queued_bytes: int,
        idle_timeout_s: float,
    ) -> None:
        """answer runs one turn and returns when its last event has been sent."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._answer = answer
        self._latest = latest
        self._max_queued_bytes = max_queued_bytes
        self._idle_timeout_s = idle_timeout_s
        self._queued: list[bytes] = []
        self._arrived = asyncio.Event()
        self._gone = asyncio.Event()
        self._set_working: Callable[[bool], None] = scope["extensions"][WORKING_EXTENSION]

    async def run(self) -> None:
        """Answer requests until the client leaves, or sends none for a while."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        self._set_working(False)
        reader = asyncio.create_task(self._read())
        try:
            while await self._has_next():
                self._set_working(True)
                await self._answer_next(self._queued.pop(0))
                self._set_working(bool(self._queued))
        except ClientGoneError:
            pass
        finally:
            self._latest.drop(self)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _has_next(self) -> bool:
        """Wait for a request. Return False when the connection has ended; end it when it is idle for too long."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                while not self._queued and not self._gone.is_set():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            reason = f"no request for {self._idle_timeout_s:g} s"
            with contextlib.suppress(OSError):
                await self._send({"type": "websocket.close", "code": 1000, "reason": reason})
            return False
        return not self._gone.is_set()

    async def _read(self) -> None:
        """Queue arriving messages, also while a response runs, to notice a client that leaves."""
        while (message := await self._receive())["type"] == "websocket.receive":
            data = message.get("bytes") or (message.get("text") or "").encode()
            if len(data) > self._max_queued_bytes:
                with contextlib.suppress(ClientGoneError):
                    await self._send_event(error_event(error_body(body_too_large(self._max_queued_bytes)), 413))
            elif len(self._queued) >= MAX_QUEUED or sum(map(len, self._queued)) + len(data) > self._max_queued_bytes:
                text = (
                    f"too many requests wait on this connection: the limits are {MAX_QUEUED} requests and "
                    f"{self._max_queued_bytes} bytes; send the next one when a response has ended"
                )
                with contextlib.suppress(ClientGoneError):
                    await self._send_event(error_event(error_body(ApiError(ErrorKind.OVERLOADED, text)), 429))
            else:
                self._queued.append(data)
                self._arrived.set()
        self._gone.set()
        self._arrived.set()

    async def _answer_next(self, data: bytes) -> None:
        """Raises ClientGoneError."""
        try:
            turn = self._turn(data)
        except ApiError as error:
            await self._send_event(error_event(error_body(error), error.kind.status))
            return
        sender = _TurnSender(self._send_event, turn.stream_id)
        exchange = Exchange(self._turn_scope(), self._wait_for_end, sender)
        exchange.unread_body = turn.body
        await self._answer(exchange, turn)
        if self._gone.is_set():
            raise ClientGoneError
        if sender.has_failed and turn.is_continuation:
            # As at OpenAI: a continuation that fails ends its chain, unless the response is stored.
            self._latest.drop(self)

    def _turn(self, data: bytes) -> Turn:
        """Raises ApiError."""
        try:
            envelope = _envelope_decoder.decode(data)
            fields = _fields_decoder.decode(data)
        except msgspec.ValidationError as error:
            raise ApiError(ErrorKind.INVALID_VALUE, f"message: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ApiError(ErrorKind.INVALID_JSON, "message: not valid JSON") from None
        if envelope.type != _CREATE:
            invalid("type", f'must be "{_CREATE}", got {shorten(envelope.type)}')
        if envelope.background:
            invalid("background", "not available over a WebSocket; use POST /v1/responses")
        if envelope.stream_id is not None and not 0 < len(envelope.stream_id) <= _MAX_STREAM_ID:
            invalid("stream_id", f"must have 1 to {_MAX_STREAM_ID} characters, got {len(envelope.stream_id)}")
        stream_id = fields.get("stream_id") if envelope.stream_id is not None else None
        rest = {name: value for name, value in fields.items() if name not in ("type", "generate", "stream_id")}
        is_continuation = envelope.previous_response_id is not None
        body = msgspec.json.encode(rest | {"stream": True})
        return Turn(body, envelope.generate is not False, self, self._latest, is_continuation, stream_id)

    def _turn_scope(self) -> Scope:
        headers = [header for header in self._scope["headers"] if header[0] not in _NOT_OF_A_TURN]
        return {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [*headers, (b"content-type", b"application/json")],
            "client": self._scope.get("client"),
            "extensions": {ABORT_EXTENSION: self._scope["extensions"][ABORT_EXTENSION]},
        }

    async def _wait_for_end(self) -> AsgiMessage:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send_event(self, event: bytes) -> None:
        """Raises ClientGoneError."""
        try:
            await self._send({"type": "websocket.send", "text": event.decode()})
        except OSError:
            raise ClientGoneError from None


class _TurnSender:
    """Sends the events of an answer, which an exchange writes as server-sent events, as messages."""

    def __init__(self, send_event: Callable[[bytes], Awaitable[None]], stream_id: msgspec.Raw | None) -> None:
        self.has_failed = False
        """Whether the answer was an error, other than one that asks to retry later."""
        self._send_event = send_event
        self._tail = b"" if stream_id is None else b',"stream_id":%b}' % bytes(stream_id)
        self._status = 0
        self._body = b""

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if self._status != 200:
            self._body += message["body"]
            if not message.get("more_body", False):
                await self._send_one(error_event(self._body, self._status), has_failed=not self._may_retry())
            return
        for block in message["body"].split(b"\n\n"):
            data = block[block.find(b"data: ") + 6 :] if b"data: " in block else b""
            if data.startswith(_ERROR_HEAD):
                await self._send_one(error_event(data, 500), has_failed=True)
            elif data.startswith(b"{"):  # not [DONE]
                await self._send_one(data, has_failed=data.startswith(_FAILED_HEAD))

    def _may_retry(self) -> bool:
        return self._status in (429, 503)

    async def _send_one(self, event: bytes, *, has_failed: bool) -> None:
        self.has_failed |= has_failed
        await self._send_event(event[:-1] + self._tail if self._tail else event)


def error_event(body: bytes, status: int) -> bytes:
    """Return an error object as OpenAI's event of a WebSocket."""
    error = msgspec.json.decode(body)["error"]
    return msgspec.json.encode({"type": "error", "status": status, "error": error})
