"""Servers that answer with their own name, and a client that opens a connection for each request."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.serve.fleet.cluster import Server


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert isinstance(self.server, Upstream)
        self.server.answer(self)

    do_GET = do_POST  # noqa: N815 - the base class's name

    def log_message(self, *_arguments: object) -> None: ...


class Upstream(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, number: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.as_server = Server(number, "127.0.0.1", self.server_port)
        self.may_end = threading.Event()
        self.deaths: list[int] = []

    def handle_error(self, *_arguments: object) -> None:
        """A health check reads no more than the status line."""

    def answer(self, handler: _Handler) -> None:
        """The name; to /stream with a second part once may_end is set. To /death nothing, the first time."""
        if handler.path == "/death" and not self.deaths:
            self.deaths.append(self.as_server.number)
            handler.close_connection = True
            return
        name = self.as_server.name.encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(2 * len(name) if handler.path == "/stream" else len(name)))
        handler.end_headers()
        handler.wfile.write(name)
        if handler.path == "/stream":
            handler.wfile.flush()
            self.may_end.wait()
            handler.wfile.write(name)


@contextmanager
def upstreams(count: int) -> Iterator[list[Upstream]]:
    servers = [Upstream(number) for number in range(count)]
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.may_end.set()
            server.shutdown()
            server.server_close()


def ask(port: int, path: str, body: str | None = None, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return status and body. A body is sent by POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET" if body is None else "POST", path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
