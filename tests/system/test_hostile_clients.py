"""Real processes and sockets: clients that hang, and requests cut at every place, beside honest clients."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.frontend.transport.incomplete import MIN_AGE_S
from tests.frontend.transport.test_pipelined_requests import FIRSTS, SECOND, responses_in
from tests.system.odd_bodies import odd_bodies
from tests.system.processes import Frontend, descendants, running, start_backend, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_SLOW = 2000
MAX_FDS = 1200
"""Fewer than there are slow clients."""
NUM_ROUNDS = 30
NUM_REPLACED = 20
"""Replaced in each round. Together they fill fewer places than there are: if rounds are quick, all newcomers are too
young to be displaced."""
MAX_OPEN_REQUESTS = 128
SLOW_BEGINNINGS = (
    b"",
    b"P",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
)
HONEST = {"prompt": [1, 2, 3], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    path = tmp_path_factory.mktemp("hostile") / "link" / "s"
    backend = start_backend(path, "--forward-pass", "fake", "--kv-budget", "64MB")
    frontend = Frontend(path, "--max-open-requests", str(MAX_OPEN_REQUESTS), max_fds=MAX_FDS)
    with running(frontend, backend):
        frontend.wait_ready()
        yield frontend


@pytest.fixture
def _many_sockets() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = NUM_SLOW + 500 + len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, hard)))
    except (ValueError, OSError):  # only root may raise the hard limit
        pytest.skip(f"needs {needed} file descriptors; raise the hard limit of {hard}: ulimit -Hn {needed}, as root")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, max(needed, hard)))


def address_of(server: Frontend) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


def slow_client(server: Frontend, beginning: bytes) -> socket.socket:
    connection = socket.create_connection(address_of(server), timeout=5.0)
    connection.sendall(beginning)
    return connection


def closed_places(clients: list[socket.socket]) -> list[int]:
    """Return the indices of the clients whose connection the server has closed."""
    poll = select.poll()
    by_fd = {client.fileno(): place for place, client in enumerate(clients)}
    for fd in by_fd:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    return [by_fd[fd] for fd, _ in poll.poll(0)]


def replace_closed(server: Frontend, clients: list[socket.socket], most: int) -> None:
    """Connect some of the slow clients again that the server has closed."""
    for place in closed_places(clients)[:most]:
        clients[place].close()
        clients[place] = slow_client(server, SLOW_BEGINNINGS[place % len(SLOW_BEGINNINGS)])


@pytest.mark.usefixtures("_many_sockets")
def test_honest_clients_are_served_while_thousands_hang(server: Frontend) -> None:
    with ExitStack() as stack:
        clients = [slow_client(server, SLOW_BEGINNINGS[number % len(SLOW_BEGINNINGS)]) for number in range(NUM_SLOW)]
        stack.callback(lambda: [client.close() for client in clients])
        # The system hands a burst over in parts, over seconds if its queue (net.core.somaxconn) is short.
        wait_until(lambda: len(closed_places(clients)) >= NUM_SLOW - MAX_FDS, 30.0)
        time.sleep(MIN_AGE_S)  # only then are all of them slow
        for _ in range(NUM_ROUNDS):
            for path, body in (("/v1/completions", HONEST), ("/health", None)):
                response = httpx.request(
                    "GET" if body is None else "POST",
                    f"{server.url}{path}",
                    json=body,
                    timeout=10.0,
                    verify=False,  # noqa: S501 - plain HTTP
                )
                assert response.status_code == 200, response.text
            replace_closed(server, clients, NUM_REPLACED)
    server.wait_idle()


def conversation(server: Frontend, pieces: tuple[bytes, bytes]) -> bytes:
    """Send two pieces in segments of their own; return all that the server sends until it closes."""
    received = b""
    with socket.create_connection(address_of(server), timeout=10.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(pieces[0])
        if select.select([connection], [], [], 0.1)[0]:  # answered before the second piece
            received = connection.recv(1 << 16)
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(pieces[1])
            while part := connection.recv(1 << 16):
                received += part
    return received


def test_second_request_on_a_real_connection_is_answered_in_turn_or_not_read(server: Frontend) -> None:
    """The many cuts are tested without sockets; here the counts of the backend show what was run."""

    def num_accepted() -> int:
        page = server.get("/metrics").text
        return int(float(page.partition("\npenstock_requests_accepted_total ")[2].split()[0]))

    server.wait_idle()
    accepted, answered = num_accepted(), 0
    for name in ("answered", "streamed", "invalid", "unknown path, chunked", "HTTP/1.0 stream", "closing"):
        first = FIRSTS[name]
        end = len(first.data)
        for cut in (end - 10, end, end + 1, end + len(SECOND) - 1):
            data = first.data + SECOND.replace(b"host: a", b"host: a\r\nconnection: close")
            responses = responses_in(conversation(server, (data[:cut], data[cut:])))
            statuses = [status for status, _ in responses]
            assert statuses in ([first.status], [first.status, 200]), (name, cut)
            answered += statuses.count(200)
    server.wait_idle()
    assert num_accepted() - accepted == answered


def test_odd_requests_get_error_objects_and_leave_nothing_behind(server: Frontend) -> None:
    """Bodies made from /openapi.json, most of them wrong, and paths and methods that do not exist."""
    random = Random(20261122)
    document = server.get("/openapi.json").json()
    worker = descendants(server.process.pid)[0]
    server.wait_idle()
    fds, labels = num_fds(worker), num_labels(server)
    with httpx.Client(base_url=server.url, timeout=20.0) as client:
        for path, body in odd_bodies(document, random, num_samples=3):
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code < 500, (path, body[:500], response.text)
            if response.status_code >= 400:
                error = response.json()["error"]
                if isinstance(error, str):  # text-embeddings-inference's shape
                    assert error
                    assert response.json()["error_type"]
                    continue
                # Only an error of the body as a whole names no field; Anthropic's object has no place for one.
                assert error["message"], (path, body[:500])
                is_whole = "body" in error["message"] or "time limit" in error["message"]
                assert is_whole or "param" not in error or error["param"], (path, body[:500], error)
        for number in range(300):
            method = random.choice(("GET", "POST", "PUT", "PATCH", "TRACE", "OPTIONS", "X" * 15, "DELETE"))
            response = client.request(method, f"/{number}/{'%ff' * random.randrange(9)}{'/..' * random.randrange(3)}")
            is_page = response.url.path == "/" and method == "GET"
            assert is_page or 400 <= response.status_code < 500, (method, response.url)
    server.wait_idle()
    wait_until(lambda: num_fds(worker) <= fds, 10.0)
    assert num_labels(server) <= labels + 20  # statuses that were new
    assert descendants(server.process.pid)[0] == worker


def num_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_labels(server: Frontend) -> int:
    return sum(not line.startswith("#") for line in server.get("/metrics").text.splitlines())
