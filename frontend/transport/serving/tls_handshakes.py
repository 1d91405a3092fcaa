"""TLS connections before they speak HTTP. A client that never ends its handshake counts as one connection."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

from penstock.frontend.transport.errors import ApiError
from penstock.frontend.transport.incomplete import client_network
from penstock.frontend.transport.serving.connections import Connections
from penstock.frontend.transport.serving.http_limits import LimitedProtocol
from penstock.frontend.transport.serving.tls import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S


class TlsHandshake(SSLProtocol):  # type: ignore[misc]
    """One connection, counted from the start of its handshake.

    uvloop's own servers use such a protocol too, but report a connection only after its handshake.
    """

    def __init__(self, connections: Connections, context: ssl.SSLContext, **uvicorn_args: Any) -> None:
        self._connections = connections
        self._loop_time = asyncio.get_running_loop().time
        over_tls = _HttpOverTls(connections, self, **uvicorn_args)
        super().__init__(
            asyncio.get_running_loop(),
            over_tls,
            context,
            None,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._below = transport
        super().connection_made(transport)
        address = client_network(transport.get_extra_info("peername"))
        if not self._connections.add(self, address, self._loop_time()):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self)

    @property
    def num_unsent_bytes(self) -> int:
        """Encrypted bytes that are waiting to be sent."""
        return 0 if self._below.is_closing() else self._below.get_write_buffer_size()

    def close_for_another(self) -> None:
        """Called when the handshake takes long and a new connection needs its place."""
        self._below.abort()

    def shutdown(self) -> None:
        """Called when the handshake takes long and the server stops."""
        self._below.abort()


class _HttpOverTls(LimitedProtocol):
    """HTTP on a connection whose handshake is done.

    TLS waits for the client to confirm a close, but a client with an idle connection does not answer. So the wait is
    cut short: it would keep the connection counted, and the server from stopping.
    """

    def __init__(self, connections: Connections, handshake: TlsHandshake, **uvicorn_args: Any) -> None:
        super().__init__(connections, **uvicorn_args)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connections.remove(self._handshake)
        super().connection_made(transport)

    def close_for_another(self) -> None:
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_if_closing()

    def shutdown(self) -> None:
        super().shutdown()
        self._end_if_closing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._end_if_closing()

    def _refuse(self, error: ApiError) -> None:
        super()._refuse(error)
        self._end_if_closing()

    def _end_if_closing(self) -> None:
        if self.transport.is_closing():
            self.loop.call_later(SHUTDOWN_TIMEOUT_S, self._end)

    def _end(self) -> None:
        """Abort the connection unless the client is still reading its answer."""
        if self.transport.get_write_buffer_size() or self._handshake.num_unsent_bytes:
            self._end_if_closing()
        else:
            self.transport.abort()
