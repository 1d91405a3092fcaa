"""uvicorn's WebSocket protocol as one of the worker's connections: counted, closed when idle, drained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from penstock.frontend.transport.asgi import ABORT_EXTENSION, WORKING_EXTENSION
from penstock.frontend.transport.serving.connections import Connections

WEB_SOCKET_PATHS = (b"/v1/responses",)
PING_INTERVAL_S = 20.0
"""Interval of pings. A peer that does not answer one for as long again is gone."""
_MAX_LINE_BYTES = 4096
"""Length of a line that the websockets library parses; it has a limit of its own above this one."""


def upgrade_head(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return the part of a request's head for the WebSocket handshake; None if the request asks for no WebSocket here.

    Such a request is answered over HTTP/1.1.
    """
    if httptools.parse_url(url).path not in WEB_SOCKET_PATHS:
        return None
    names = [name for name, _ in headers]
    upgrades = [value.strip().lower() for name, value in headers if name == b"upgrade"]
    if upgrades != [b"websocket"] or b"content-length" in names or b"transfer-encoding" in names:
        return None
    needed = [(name, value) for name, value in headers if name.startswith(b"sec-websocket-") or name == b"host"]
    lines = [b"GET %b HTTP/1.1" % url, *(b"%b: %b" % header for header in needed)]
    if max(map(len, lines)) > _MAX_LINE_BYTES:
        return None
    return b"\r\n".join([*lines, b"connection: upgrade", b"upgrade: websocket", b"", b""])


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One connection. It is idle unless the application reports that it works for it."""

    def __init__(
        self,
        connections: Connections,
        headers: Sequence[tuple[bytes, bytes]],
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        """headers are those of the upgrade request."""
        super().__init__(config, server_state, app_state)
        self._counted_in = connections
        self._headers = headers
        self._is_working = False
        self._is_ending = False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._counted_in.remove(self)

    async def run_asgi(self) -> None:
        """Called by uvicorn after the client's part of the handshake."""
        self.scope["headers"] = list(self._headers)
        extensions: dict[str, Any] = {ABORT_EXTENSION: self.transport.abort, WORKING_EXTENSION: self._set_working}
        self.scope["extensions"] = extensions
        await super().run_asgi()

    def _set_working(self, is_working: bool) -> None:
        self._is_working = is_working
        if self.transport.is_closing():
            return
        if is_working:
            self._counted_in.set_busy(self)
        elif self._is_ending or self._counted_in.is_draining:
            super().shutdown()
        else:
            self._counted_in.set_idle(self, self.loop.time())

    def close_for_another(self) -> None:
        """Called when a new connection needs the place of this one, which is idle."""
        self._close()

    def shutdown(self) -> None:
        """Called when the server stops. What the application works on may still end."""
        self._is_ending = True
        if not self._is_working:
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():  # uvicorn would send a second close frame, which raises an error
            super().shutdown()
