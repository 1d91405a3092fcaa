"""Runs uvicorn on one listening socket, with our HTTP protocol and a drain that ends in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from penstock.frontend.transport.serving.acceptor import SharedAcceptor
from penstock.frontend.transport.serving.connections import MAX_CONNECTIONS, Connections
from penstock.frontend.transport.serving.http_limits import LimitedProtocol
from penstock.frontend.transport.serving.tls_handshakes import TlsHandshake

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from penstock.frontend.transport.asgi import AsgiApp
    from penstock.frontend.transport.open_exchanges import OpenExchanges
    from penstock.frontend.transport.serving.accept_table import AcceptTable

KEEP_ALIVE_TIMEOUT_S = 75
"""Longer than load balancers keep connections (60 s is common), so that they never use one that was just closed."""
_LAST_REQUESTS_S = 0.5
"""How long a server that stops still answers requests that arrive on open connections: they were on their way."""
_LAST_ERRORS_TIMEOUT_S = 2.0
"""How long the errors that end requests may take to be sent."""
_FORCED_CLOSE_TIMEOUT_S = 1.0
_KEEP_SOCKET_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""A worker that ends leaves the Unix socket's file in place: other workers listen there too."""


class _Server(uvicorn.Server):
    accept_table: AcceptTable | None = None
    """Shared with the other workers of the socket; None if there are none."""

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Replaces uvicorn's method, which cannot take a Unix socket that listens already."""
        await self.lifespan.startup()
        loop, config = asyncio.get_running_loop(), self.config

        def new_connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        self.servers = []
        for listening in sockets or ():
            if self.accept_table is not None:
                acceptor = SharedAcceptor(listening, self.accept_table, new_connection)
                acceptor.start()
                self.servers.append(acceptor)  # type: ignore[arg-type] # as far as uvicorn uses it
                continue
            is_unix = listening.family == socket.AF_UNIX
            create: Callable[..., Awaitable[asyncio.Server]] = (
                partial(loop.create_unix_server, **_KEEP_SOCKET_FILE) if is_unix else loop.create_server
            )
            self.servers.append(
                await create(
                    new_connection,
                    sock=listening,
                    backlog=config.backlog,
                )
            )
        self.started = True

    def stop_accepting(self, listening: socket.socket) -> None:
        for server in self.servers:
            server.close()
        listening.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise SIGTERM again after draining; we exit 0 instead.
        yield


def server_config(
    app: AsgiApp, connections: Connections | None = None, *, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """Return how uvicorn runs the app."""
    if connections is None:
        connections = Connections()
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, connections) if tls is None else partial(TlsHandshake, connections, tls),  # type: ignore[arg-type]
        ws="none",
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
    ) -> None:
        """accept_table is shared with the other workers of the socket."""
        self._exchanges = exchanges
        self._listening = listening
        self._drain_timeout_s = drain_timeout_s
        on_change = None if accept_table is None else accept_table.set_connections
        self._connections = Connections(max_connections, on_change)
        self._server = _Server(server_config(app, self._connections, tls=tls))
        self._server.accept_table = accept_table
        self._stop = asyncio.Event()
        self._skip_drain = asyncio.Event()

    async def run(self) -> None:
        """Serve until stopped and drained."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        sweeper = asyncio.create_task(self._exchanges.run())
        drainer = asyncio.create_task(self._drain())
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            for task in (sweeper, drainer):
                task.cancel()
            await asyncio.gather(sweeper, drainer, return_exceptions=True)

    def stop(self) -> None:
        """Stop accepting and start draining. A second call ends the requests that still run."""
        if self._stop.is_set():
            self._skip_drain.set()
        self._stop.set()

    async def _answer_last_requests(self) -> None:
        """Accept no more, and answer what is on its way on open connections: another worker cannot."""
        self._exchanges.is_stopping = True
        self._connections.end_after_next_answer = True
        self._server.stop_accepting(self._listening)
        for _ in range(round(_LAST_REQUESTS_S / 0.02)):
            if not len(self._connections) or self._skip_drain.is_set():
                break
            await asyncio.sleep(0.02)

    async def _drain(self) -> None:
        await self._stop.wait()
        await self._answer_last_requests()
        self._exchanges.start_draining()
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._skip_drain.wait(), self._drain_timeout_s)
        self._exchanges.end_all()
        # Time to send the errors; then abort connections whose clients do not read.
        for _ in range(round(_LAST_ERRORS_TIMEOUT_S / 0.05)):
            if not self._exchanges:
                break
            await asyncio.sleep(0.05)
        self._server.force_exit = True
        await asyncio.sleep(_FORCED_CLOSE_TIMEOUT_S)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
