"""Runs uvicorn on one listening socket, with our HTTP protocol and a drain that ends in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from functools import partial

import uvicorn

from penstock.frontend.transport.asgi import AsgiApp
from penstock.frontend.transport.open_exchanges import OpenExchanges
from penstock.frontend.transport.serving.accept_table import AcceptTable
from penstock.frontend.transport.serving.acceptor import SharedAcceptor
from penstock.frontend.transport.serving.connections import MAX_CONNECTIONS, Connections
from penstock.frontend.transport.serving.http_limits import LimitedProtocol
from penstock.frontend.transport.serving.tls_handshakes import TlsHandshake
from penstock.frontend.transport.serving.web_socket import PING_INTERVAL_S, WebSocketConnection

KEEP_ALIVE_TIMEOUT_S = 75
"""Longer than load balancers keep connections (60 s is common), so that they never use one that was just closed."""
MAX_MESSAGE_BYTES = 2 << 20
"""Size of a message that a WebSocket receives; a longer one closes the connection."""
_IDLE_CLOSE_DELAY_S = 0.5
"""How long a server that stops keeps a connection open after an answer, for a request that is on its way."""
_LAST_HEADS_TIMEOUT_S = 5.0
"""How long it waits for a connection's first request, or for the rest of its head."""
_POLL_INTERVAL_S = 0.02
_LAST_ERRORS_TIMEOUT_S = 2.0
"""How long the errors that end requests may take to be sent."""
_FORCED_CLOSE_TIMEOUT_S = 1.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, accept_table: AcceptTable) -> None:
        super().__init__(config)
        self._accept_table = accept_table

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Replaces uvicorn's method, whose servers cannot share a socket fairly."""
        await self.lifespan.startup()
        config = self.config

        def new_connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        self.servers = []
        for listening in sockets or ():
            acceptor = SharedAcceptor(listening, self._accept_table, new_connection)
            acceptor.start()
            self.servers.append(acceptor)  # type: ignore[arg-type] # as far as uvicorn uses it
        self.started = True

    async def stop_accepting(self, listening: socket.socket) -> None:
        """Returns when all connections that were accepted have begun."""
        for server in self.servers:
            server.close()
        listening.close()
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise SIGTERM again after draining; we exit 0 instead.
        yield


def server_config(
    app: AsgiApp,
    connections: Connections | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    if connections is None:
        connections = Connections()
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, connections) if tls is None else partial(TlsHandshake, connections, tls),  # type: ignore[arg-type]
        ws=WebSocketConnection,
        ws_max_size=max_message_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_INTERVAL_S,
        ws_per_message_deflate=False,  # tokens are small, and compressing each costs more than sending it
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
    )


class HttpServer:
    """Serves the app on a socket that listens already."""

    def __init__(
        self,
        app: AsgiApp,
        exchanges: OpenExchanges,
        listening: socket.socket,
        *,
        drain_timeout_s: float,
        max_connections: int = MAX_CONNECTIONS,
        tls: ssl.SSLContext | None = None,
        accept_table: AcceptTable | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """accept_table is shared with the other workers of the socket; None if there are none."""
        if accept_table is None:
            accept_table = AcceptTable.alone()
        self._exchanges = exchanges
        self._listening = listening
        self._drain_timeout_s = drain_timeout_s
        self._connections = Connections(max_connections, accept_table.set_connections)
        config = server_config(app, self._connections, tls=tls, max_message_bytes=max_message_bytes)
        self._server = _Server(config, accept_table)
        self._stop = asyncio.Event()
        self._skip_drain = asyncio.Event()

    async def run(self) -> None:
        """Serve until stopped and drained."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._exchanges.run()), tasks.create_task(self._drain())]
            await self._server.serve(sockets=[self._listening])
            for task in beside:
                task.cancel()

    def stop(self) -> None:
        """Stop accepting and start draining. A second call ends the requests that still run."""
        if self._stop.is_set():
            self._skip_drain.set()
        self._stop.set()

    async def _drain(self) -> None:
        await self._stop.wait()
        deadline_s = time.monotonic() + self._drain_timeout_s
        self._exchanges.start_draining()
        self._connections.start_draining()
        await self._server.stop_accepting(self._listening)
        await self._answer_last_requests(deadline_s)
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._skip_drain.wait(), max(0.0, deadline_s - time.monotonic()))
        self._exchanges.end_all()
        # Time to send the errors; then abort connections whose clients do not read.
        for _ in range(round(_LAST_ERRORS_TIMEOUT_S / 0.05)):
            if not self._exchanges:
                break
            await asyncio.sleep(0.05)
        self._connections.close_idle(asyncio.get_running_loop().time())
        self._server.force_exit = True
        await asyncio.sleep(_FORCED_CLOSE_TIMEOUT_S)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _answer_last_requests(self, deadline_s: float) -> None:
        """Answer requests that are on their way on open connections, until none is open: no other worker can.

        A connection without a request is kept for longer than one that has had an answer. A client sends its first
        request as soon as it is connected, but may be slow; an idle client may never send another.
        """
        loop = asyncio.get_running_loop()
        began_s = looked_s = loop.time()
        while len(self._connections) and not self._skip_drain.is_set() and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_INTERVAL_S)
            # Times are those of the last turn: since then the sockets have been read, however late this turn is.
            waited_s = looked_s - began_s
            if waited_s >= _IDLE_CLOSE_DELAY_S:
                self._connections.close_idle(looked_s - _IDLE_CLOSE_DELAY_S)
            if waited_s >= _LAST_HEADS_TIMEOUT_S:
                self._connections.close_incomplete(looked_s - _LAST_HEADS_TIMEOUT_S)
            looked_s = loop.time()
