"""uvicorn's httptools protocol with limits that httptools lacks, counted before the parser sees the bytes.

It also refuses requests that can be read in two ways (request smuggling) and closes connections that take too long. A
second request before the first has been answered is not served: the connection closes after the first answer, as RFC
9112 section 9.3.2 allows. Until then it is still read, so that a client that hangs up is noticed.
"""

from __future__ import annotations

import asyncio
import string
import sys
from collections.abc import Mapping
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.frontend.transport.asgi import ABORT_EXTENSION, PART_EXTENSION
from penstock.frontend.transport.errors import ApiError, ErrorKind, error_body, retry_later
from penstock.frontend.transport.incomplete import client_network
from penstock.frontend.transport.serving.connections import Connections
from penstock.frontend.transport.serving.web_socket import WebSocketConnection, upgrade_head

MAX_HEAD_BYTES = 32 << 10
"""Request line and headers; also everything else that is not body: chunk extensions, trailers."""
MAX_HEADER_LINES = 100
HEAD_TIMEOUT_S = 10.0
UNREAD_BODY_TIMEOUT_S = 10.0
"""How long the rest of a body may take once its request has been answered."""
LINGER_S = 5.0
"""How long a refused client may go on sending, to a server that no longer listens to what it says."""
MAX_LINGER_BYTES = 16 << 20

_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")
_HOST_BYTES = (string.ascii_letters + string.digits + ".-_~:[]%").encode()


class _RefusedError(Exception):
    """Raised in a parser callback to stop the parser. `_refusal` is the answer."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, connections: Connections, **uvicorn_args: Any) -> None:
        super().__init__(**uvicorn_args)
        # Connection state
        self._connections = connections
        self._address = b""
        self._closed_to_input = False
        self._deadline: asyncio.TimerHandle | None = None
        self._num_bytes_to_drop: int | None = None
        """Bytes that a refused client may still send; None unless the connection lingers."""
        # Request state
        self._head_complete = False
        self._message_complete = True
        self._num_bytes_without_body = 0
        self._num_header_lines = 0
        self._asks_for_upgrade = False
        self._piece = b""
        self._refusal: ApiError | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = client_network(transport.get_extra_info("peername"))
        if not self._connections.add(self, self._address, self.loop.time()):
            self._refuse(retry_later(ErrorKind.OVERLOADED, "too many connections to this worker; retry later", 1))
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self)
        # After a reset uvicorn keeps its timer, and with it the whole connection.
        self._unset_keepalive_if_required()
        self._unset_deadline()

    def timeout_keep_alive_handler(self) -> None:
        # A plain close would wait forever for a client that has not read its answer by now.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def close_for_another(self) -> None:
        """Called when a new connection needs the place of this one, which is idle or incomplete."""
        if self._closed_to_input or self._is_unread_body():
            self.transport.abort()
        elif self._waits_for_head():
            message = "the headers were not complete when another connection needed the place of this one"
            self._refuse(ApiError(ErrorKind.TOO_SLOW, message))
        else:
            self.timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Close the connection, or let its answer say that it is the last.

        If the answer has begun without saying so, the client may send another request at once. A close after this
        answer would reset it, and so would a close before the end of the body.
        """
        if self._num_bytes_to_drop is not None:
            return  # it ends soon, and needs that time
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        elif self._message_complete and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._message_complete:
            self._wait_for_request()
        else:
            self._connections.set_incomplete(self, self._address, self.loop.time())

    def _wait_for_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._connections.set_idle(self, self.loop.time())

    def data_received(self, data: bytes) -> None:
        if self._num_bytes_to_drop is not None:
            self._num_bytes_to_drop -= len(data)
            if self._num_bytes_to_drop < 0:
                self.transport.abort()
            return
        start = 0
        while start < len(data) and not self._closed_to_input and not self.transport.is_closing():
            # At most the remaining limit at a time, so that the parser cannot collect more either.
            piece = data[start : start + MAX_HEAD_BYTES - self._num_bytes_without_body]
            start += len(piece)
            self._num_bytes_without_body += len(piece)
            self._piece = piece
            super().data_received(piece)
            if self._num_bytes_without_body >= MAX_HEAD_BYTES:
                self._refuse(_headers_too_large(f"more than {MAX_HEAD_BYTES} bytes"))
        self._watch_time()

    def _watch_time(self) -> None:
        """Note whether the connection is incomplete. Start or stop the timer: a head must be complete in time, and so
        must a body whose request has been answered."""
        if self._closed_to_input or self.transport.is_closing():
            return
        waits_for_head = self._waits_for_head()
        if not waits_for_head and not self._is_unread_body():
            self._unset_deadline()
            if self.cycle is not None and not self.cycle.response_complete:
                self._connections.set_busy(self)
            elif self.cycle is not None and self._message_complete:  # the rest of an answered request
                self._wait_for_request()
            return
        self._connections.set_incomplete(self, self._address, self.loop.time())
        if self._deadline is None:
            timeout_s = HEAD_TIMEOUT_S if waits_for_head else UNREAD_BODY_TIMEOUT_S
            self._deadline = self.loop.call_later(timeout_s, self._too_slow)

    def _waits_for_head(self) -> bool:
        """Whether a part of a request's head has arrived."""
        return not self._head_complete and self._num_bytes_without_body > 0

    def _is_unread_body(self) -> bool:
        """Whether a request has been answered before the end of its body."""
        return self._head_complete and not self._message_complete and self.cycle.response_complete

    def _too_slow(self) -> None:
        self._deadline = None
        if self._head_complete:
            self.transport.abort()
        else:
            message = f"the headers were not complete after the limit of {HEAD_TIMEOUT_S:g} s"
            self._refuse(ApiError(ErrorKind.TOO_SLOW, message))

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # Parser callbacks

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._closed_to_input = True
            raise _RefusedError
        super().on_message_begin()
        self._head_complete = False
        self._message_complete = False
        self._num_header_lines = 0
        # Lets the app drop the connection of a client that does not read its answer.
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort, PART_EXTENSION: self}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_lines += 1
        if self._num_header_lines > MAX_HEADER_LINES:
            self._refuse_in_parser(_headers_too_large(f"more than {MAX_HEADER_LINES} lines"))
        if not self._head_complete:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._asks_for_upgrade = self.parser.should_upgrade()
        if self._asks_for_upgrade:
            return  # the parser stops here, see _should_upgrade
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _UnchunkedSend(self.cycle)  # type: ignore[method-assign]
        self._head_complete = True
        self._num_bytes_without_body = 0

    def on_body(self, body: bytes) -> None:
        self._num_bytes_without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._num_bytes_without_body = 0
        self._message_complete = True
        self._head_complete = False
        super().on_message_complete()
        if self._connections.is_draining and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _check_head(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse_in_parser(_bad_http(f"HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0"))
        if self.parser.get_method() == b"CONNECT":
            self._refuse_in_parser(_bad_http("CONNECT is not supported: this server is not a proxy"))
        values: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            values.setdefault(name, []).append(value)
        hosts = values.get(b"host", [])
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            self._refuse_in_parser(_bad_http(f"a request needs exactly one Host header, got {len(hosts)}"))
        if hosts and hosts[0].translate(None, _HOST_BYTES):
            self._refuse_in_parser(_bad_http("the Host header must be a host and a port, without other characters"))
        codings = values.get(b"transfer-encoding")
        if codings is not None:
            if version == "1.0" or len(codings) > 1 or codings[0].strip().lower() != b"chunked":
                self._refuse_in_parser(_bad_http("the only Transfer-Encoding accepted is chunked"))
            if b"content-length" in values:
                self._refuse_in_parser(_bad_http("Content-Length and Transfer-Encoding cannot both be sent"))

    # PartWriter

    def takes_part(self) -> bool:
        cycle = self.cycle
        may_write = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        return may_write and bool(cycle.chunked_encoding) and not self.flow.write_paused

    def write_part(self, body: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    # Answers that the protocol itself sends

    def _refuse_in_parser(self, error: ApiError) -> None:
        self._refusal = error
        raise _RefusedError

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - replaces uvicorn's message
        """Called by uvicorn when the parser has stopped."""
        if not self._closed_to_input:
            self._refuse(self._refusal or _bad_http("this is not a valid HTTP request"))

    def _refuse(self, error: ApiError) -> None:
        self._closed_to_input = True
        self._unset_deadline()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The request's body will never be complete.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        body = error_body(error)
        headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers)
        lines = [b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close"))]
        self.transport.write(b"".join([STATUS_LINE[error.kind.status], *lines, b"\r\n", body]))
        # Others need the place of a client that is slow or too many. TLS waits for the client's end by itself.
        if error.kind in (ErrorKind.TOO_SLOW, ErrorKind.OVERLOADED) or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Drop what the client still sends, until it closes: to close a socket with unread bytes resets it, and the
        client could lose its answer."""
        self._num_bytes_to_drop = MAX_LINGER_BYTES
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)
        self._connections.set_incomplete(self, self._address, self.loop.time())
        self.transport.write_eof()
        self.flow.resume_reading()

    def _should_upgrade(self) -> bool:
        """Called by uvicorn when the parser has stopped at headers that ask for another protocol."""
        return (
            self._asks_for_upgrade
            and self.parser.get_method() == b"GET"
            and upgrade_head(self.url, self.headers) is not None
        )

    def handle_websocket_upgrade(self) -> None:
        """Called by uvicorn in that case: hand the socket over to the other protocol."""
        self._closed_to_input = True  # of this protocol
        self._unset_deadline()
        self.connections.discard(self)
        connection = WebSocketConnection(
            self._connections, self.headers, self.config, self.server_state, self.app_state
        )
        self._connections.replace(self, connection)
        connection.connection_made(self.transport)
        self.transport.set_protocol(connection)
        connection.data_received(upgrade_head(self.url, self.headers) or b"")

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn when the parser has stopped at headers that ask for another protocol, as some clients do in
        their first request (h2c). The request is parsed again without them: the parser would drop its body."""
        stopped = sys.exception()
        if not self._asks_for_upgrade or not isinstance(stopped, httptools.HttpParserUpgrade):
            self._refuse(_bad_http("this is not a valid HTTP request"))
            return
        self._asks_for_upgrade = False
        rest = self._piece[stopped.args[0] :]
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(b"\r\n".join([*lines, b"", b""]))
        if rest and not self._closed_to_input:
            super().data_received(rest)


class _UnchunkedSend:
    """Replaces a cycle's `send` for HTTP/1.0, which has no chunks: a body without a length ends with the connection.

    uvicorn checks the length of a body that is not chunked. So each part is added to the expected length just before it
    is sent.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._has_length = True

    async def __call__(self, message: Mapping[str, Any]) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            # uvicorn waits after the length is set; then another part could set it in between.
            while cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            cycle.expected_content_length = len(message["body"])
        await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]


def _bad_http(message: str) -> ApiError:
    return ApiError(ErrorKind.BAD_HTTP, message)


def _headers_too_large(what: str) -> ApiError:
    return ApiError(ErrorKind.HEADERS_TOO_LARGE, f"request line and headers: {what}")
