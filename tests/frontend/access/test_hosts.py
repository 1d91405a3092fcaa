"""A server without keys answers to its own host names only: DNS rebinding gets 403."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey
from penstock.frontend.access.hosts import serves_one_machine
from tests.frontend.harness import ClientConnection, Response

CHAT = "/v1/chat/completions"


def connected(connect: Callable[..., ClientConnection], *allowed_hosts: str) -> ClientConnection:
    return connect(admission=Admission(allowed_hosts=allowed_hosts))


async def ask(connection: ClientConnection, host: str, method: str = "GET", path: str = "/v1/models") -> Response:
    connection.send(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    return await connection.response()


async def status(connection: ClientConnection, host: str, method: str = "GET", *, path: str = "/v1/models") -> int:
    return (await ask(connection, host, method, path)).status


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST:8000",
        "localhost.",
        "app.localhost:3000",
        "127.0.0.1:8000",
        "192.168.7.9",
        "[::1]:8000",
        "[::1]",
        "host.docker.internal:8000",
        "mybox",
        "mybox.local:8000",
        "llm.example.org",
        "LLM.example.org:443",
    ],
)
async def test_private_host_name_is_answered(connect: Callable[..., ClientConnection], host: str) -> None:
    assert await status(connected(connect, "llm.example.org"), host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.org",
        "evil.example.org:8000",
        "localhost.evil.example.org",
        "127.0.0.1.evil.example.org",
        "evil.localhost.example.org:80",
        "not-llm.example.org",
        "sub.llm.example.org",
        "1.2.3",
        "[::1].evil.example.org",
    ],
)
async def test_public_host_name_is_refused(connect: Callable[..., ClientConnection], host: str) -> None:
    assert await status(connected(connect, "llm.example.org"), host) == 403


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/metrics"), ("OPTIONS", CHAT), ("GET", "/")])
async def test_foreign_page_gets_403_everywhere(
    connect: Callable[..., ClientConnection], method: str, path: str
) -> None:
    assert await status(connected(connect), "evil.example.org", method, path=path) == 403


async def test_refusal_names_the_header_its_value_and_the_remedy(connect: Callable[..., ClientConnection]) -> None:
    error = (await ask(connected(connect), "evil.example.org:8000")).json()["error"]
    assert (error["param"], error["code"]) == ("host", "host_not_allowed")
    assert "evil.example.org" in error["message"]
    assert "--allowed-host" in error["message"]


async def test_every_host_name_is_answered_with_a_key_or_a_star(connect: Callable[..., ClientConnection]) -> None:
    assert await status(connected(connect, "*"), "evil.example.org") == 200
    admission = Admission([ApiKey(b"sk", "one")])
    keyed = connect(admission=admission)
    assert await status(keyed, "evil.example.org", path="/health") == 200
    assert await status(keyed, "evil.example.org") == 401


async def test_host_names_are_checked_once_the_last_key_is_removed(connect: Callable[..., ClientConnection]) -> None:
    admission = Admission([ApiKey(b"sk", "one")], allowed_hosts=())
    connection = connect(admission=admission)
    assert await status(connection, "evil.example.org", path="/health") == 200
    admission.set_keys([])
    assert await status(connection, "evil.example.org", path="/health") == 403


@pytest.mark.parametrize(
    ("family", "address", "is_one"),
    [
        (socket.AF_INET, ("127.0.0.1", 0), True),
        (socket.AF_INET, ("127.8.9.1", 0), True),
        (socket.AF_INET, ("0.0.0.0", 0), False),  # noqa: S104
        (socket.AF_INET6, ("::1", 0), True),
        (socket.AF_INET6, ("::", 0), False),
        (socket.AF_UNIX, "", False),
    ],
)
def test_only_a_loopback_address_serves_one_machine(
    family: socket.AddressFamily, address: tuple[str, int] | str, is_one: bool
) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        try:
            listening.bind(address)
        except OSError:
            pytest.skip(f"this machine has no {address}")
        assert serves_one_machine(listening) == is_one
