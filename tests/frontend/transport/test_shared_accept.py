"""Workers share new connections: real processes, real sockets; no backend is needed to answer /health."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frontend.test_main import Frontend, directory, start
from tests.system.processes import wait_until

__all__ = ["directory", "start"]  # fixtures

REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def open_connections() -> Iterator[Callable[..., list[socket.socket]]]:
    """Open connections that stay open until the test ends."""
    with contextlib.ExitStack() as stack:

        def open_connections(address: tuple[str, int] | str, count: int) -> list[socket.socket]:
            opened = []
            for _ in range(count):
                family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
                client = stack.enter_context(socket.socket(family))
                client.settimeout(20)
                client.connect(address)
                opened.append(client)
            return opened

        yield open_connections


def address_of(frontend: Frontend) -> tuple[str, int]:
    return frontend.client.base_url.host, frontend.client.base_url.port or 0


def ask(client: socket.socket) -> bytes:
    """Return the status line of an answer."""
    client.sendall(REQUEST)
    answer = client.recv(4096)
    return answer.partition(b"\r\n")[0]


def accepted(frontend: Frontend, address: tuple[str, int] | str) -> list[int]:
    """Return how many connections each worker has. Other sockets come and go: it looks for a backend."""
    sockets = [worker.net_connections("all") for worker in frontend.workers()]
    return [sum(each.laddr == address for each in of_worker) - 1 for of_worker in sockets]  # one listens


def wait_started(frontend: Frontend, num_workers: int) -> None:
    """Wait until all workers accept."""
    for _ in range(num_workers):
        frontend.wait_for("no backend yet")


def test_workers_share_300_connections(
    start: Callable[..., Frontend], open_connections: Callable[..., list[socket.socket]]
) -> None:
    frontend = start("--workers", "3")
    wait_started(frontend, 3)
    address = address_of(frontend)
    clients = open_connections(address, 300)
    wait_until(lambda: sum(accepted(frontend, address)) == 300, 20)
    shares = accepted(frontend, address)
    assert max(shares) <= 125, shares
    assert {ask(client) for client in clients} == {b"HTTP/1.1 200 OK"}


def test_connections_do_not_wait_for_a_worker_that_is_stopped_or_killed(
    start: Callable[..., Frontend], open_connections: Callable[..., list[socket.socket]], directory: Path
) -> None:
    path = directory / "web.sock"
    frontend = start("--workers", "2", "--uds", str(path))
    wait_started(frontend, 2)
    first, second = frontend.workers()
    first.send_signal(signal.SIGSTOP)
    assert {ask(client) for client in open_connections(str(path), 30)} == {b"HTTP/1.1 200 OK"}
    assert accepted(frontend, str(path)) == [0, 30]
    second.send_signal(signal.SIGSTOP)
    waiting = open_connections(str(path), 10)
    for worker in (first, second):
        worker.kill()
    assert {ask(client) for client in waiting} == {b"HTTP/1.1 200 OK"}


def test_rolling_restart_loses_no_connection(start: Callable[..., Frontend]) -> None:
    frontend = start("--workers", "2")
    wait_started(frontend, 2)
    address, stop, answers = address_of(frontend), threading.Event(), []

    def ask_again_and_again() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(address, timeout=20) as client:
                    answers.append(ask(client))
            except OSError as error:
                answers.append(repr(error).encode())

    clients = [threading.Thread(target=ask_again_and_again) for _ in range(2)]
    for client in clients:
        client.start()
    for worker in frontend.workers():
        worker.terminate()
        frontend.wait_for("exited with status 0; restarting")
        frontend.wait_for("no backend yet")
    stop.set()
    for client in clients:
        client.join()
    assert set(answers) == {b"HTTP/1.1 200 OK"}
