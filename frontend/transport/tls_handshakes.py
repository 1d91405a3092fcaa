"""TLS connections until they speak HTTP: a client that never ends its handshake takes the place of one connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

from penstock.frontend.transport.http_limits import LimitedProtocol
from penstock.frontend.transport.tls import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S

if TYPE_CHECKING:
    import ssl

    from penstock.frontend.transport.connections import Connections
    from penstock.frontend.transport.errors import ApiError


class Handshake(SSLProtocol):  # type: ignore[misc]
    """One connection, one of `crowd` until HTTP is spoken over it.

    uvloop's own servers make such protocols, too, but tell nobody of a connection before its handshake is over.
    """

    def __init__(self, crowd: Connections, context: ssl.SSLContext, **of_uvicorn: Any) -> None:
        self._crowd = crowd
        self._loop_time = asyncio.get_running_loop().time
        over_tls = _OverTls(crowd, self, **of_uvicorn)
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
        if not self._crowd.add(self, self._loop_time()):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._crowd.remove(self)

    @property
    def num_unsent_bytes(self) -> int:
        """Of what has been encrypted."""
        return 0 if self._below.is_closing() else self._below.get_write_buffer_size()

    def close_idle(self) -> None:
        """Called where it takes too long, to make room for another."""
        self._below.abort()


class _OverTls(LimitedProtocol):
    """TLS ends with a word of the client's, too, but one that keeps an idle connection does not look: it is waited for
    as briefly as may be, lest it keep the connection's place, and the server from stopping."""

    def __init__(self, crowd: Connections, handshake: Handshake, **of_uvicorn: Any) -> None:
        super().__init__(crowd, **of_uvicorn)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._crowd.remove(self._handshake)
        super().connection_made(transport)

    def close_idle(self) -> None:
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
        """Unless the client is still taking its answer."""
        if self.transport.get_write_buffer_size() or self._handshake.num_unsent_bytes:
            self._end_if_closing()
        else:
            self.transport.abort()
