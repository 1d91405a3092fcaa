"""TLS connections until they speak HTTP: a client that never ends its handshake takes the place of one connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

from frontend.http_limits import LimitedProtocol
from frontend.tls import HANDSHAKE_TIMEOUT_S

if TYPE_CHECKING:
    import ssl

    from frontend.connections import Connections


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

    def close_idle(self) -> None:
        """Called where it takes too long, to make room for another."""
        self._below.abort()


class _OverTls(LimitedProtocol):
    def __init__(self, crowd: Connections, handshake: Handshake, **of_uvicorn: Any) -> None:
        super().__init__(crowd, **of_uvicorn)
        self._handshake: Handshake | None = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._handshake is not None:
            self._crowd.remove(self._handshake)
            self._handshake = None
        super().connection_made(transport)
