"""Requests refused for their type, path, method or size, before the body is decoded; and bodies in small pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.frontend.harness import ClientConnection, FakeBackend, request_bytes

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_body_of_another_content_type_is_415(connection: ClientConnection, content_type: str) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: {content_type}\r\ncontent-length: 14\r\n\r\n"
    connection.send(head.encode() + b'{"prompt":"x"}')
    assert (await connection.response()).status == 415
    assert (await connection.request("GET", "/health")).status == 200


@pytest.mark.parametrize(("headers", "status"), [("", 200), ("origin: http://evil.example\r\n", 415)])
async def test_body_without_content_type_is_json_unless_a_browser_sends_it(
    connection: ClientConnection, headers: str, status: int
) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\n{headers}content-length: 14\r\n\r\n"
    connection.send(head.encode() + b'{"prompt":"x"}')
    assert (await connection.response()).status == status


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
async def test_compressed_bodies_are_415(connection: ClientConnection, encoding: str) -> None:
    response = await connection.request("POST", COMPLETIONS, b"\x1f\x8b", [("content-encoding", encoding)])
    assert response.status == 415
    assert (await connection.request("GET", "/health")).status == 200


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/chat", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/../health",
             "/health/", "/%00", "/v1/images", "/debug", "/" + "a" * 8000]
)  # fmt: skip
async def test_unknown_paths_are_404(connection: ClientConnection, path: str) -> None:
    for method in ("GET", "POST"):
        response = await connection.request(method, path, {} if method == "POST" else None)
        assert (response.status, response.error["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("GET", "/embed", "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("OPTIONS", COMPLETIONS, "POST"),
        ("PATCH", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/test/model", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("PROPFIND", "/ready", "GET, HEAD"),
    ],
)
async def test_wrong_methods_are_405_and_name_the_allowed_ones(
    connection: ClientConnection, method: str, path: str, allowed: str
) -> None:
    response = await connection.request(method, path)
    assert (response.status, response.headers["allow"]) == (405, allowed)
    assert (await connection.request("GET", "/health")).status == 200


async def test_declared_body_over_the_limit_is_413_before_it_is_read(
    connect: Callable[..., ClientConnection],
) -> None:
    connection = connect(max_body_bytes=1000)
    connection.send(request_bytes("POST", COMPLETIONS, b"x" * 1001))
    response = await connection.response()
    assert (response.status, response.error["code"]) == (413, "request_too_large")
    assert "1000" in response.error["message"]
    assert (await connection.request("GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("head", "piece_bytes"), [("HTTP/1.1", 1 << 16), ("HTTP/1.1\r\nconnection: Close", 1000), ("HTTP/1.0", 1000)]
)
async def test_body_over_the_limit_can_be_sent_to_its_end_before_the_connection_closes(
    connect: Callable[..., ClientConnection], head: str, piece_bytes: int
) -> None:
    connection = connect(max_body_bytes=1000)
    connection.send(f"POST {COMPLETIONS} {head}\r\nhost: a\r\ncontent-length: {16 * piece_bytes}\r\n\r\n".encode())
    assert (await connection.response()).status == 413
    for _ in range(16):
        assert not connection.transport.closed
        connection.send(b"x" * piece_bytes)
        await asyncio.sleep(0)
    await connection.closed()


async def test_client_that_expects_100_continue_gets_413_instead(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(max_body_bytes=1000)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5000\r\n\r\n"
    connection.send(head.encode())
    assert (await connection.response()).status == 413
    await connection.closed()
    assert b"100 Continue" not in connection.transport.output


async def test_client_that_expects_100_continue_gets_it(connection: ClientConnection) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 14\r\n\r\n"
    connection.send(head.encode())
    await connection.output(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.send(b'{"prompt":"x"}')
    await connection.output(b"HTTP/1.1 200 OK")


async def test_chunks_over_the_limit_are_413(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(max_body_bytes=1000)
    connection.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for _ in range(11):
        connection.send(b"64\r\n" + b"x" * 100 + b"\r\n")
        await asyncio.sleep(0)
    assert (await connection.response()).status == 413
    connection.send(b"0\r\n\r\n")
    await connection.closed()


async def test_request_sent_byte_by_byte_is_answered(connection: ClientConnection) -> None:
    for byte in request_bytes("POST", COMPLETIONS, {"prompt": "x"}):
        connection.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await connection.response()).status == 200


async def test_body_in_one_byte_chunks_is_read(connection: ClientConnection) -> None:
    connection.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    body = json.dumps({"prompt": "x", "unknown": "y" * 20_000}).encode()
    connection.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert (await connection.response()).status == 200


async def test_internal_error_is_a_500_without_details_and_is_logged(
    connection: ClientConnection, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refusal = KeyError("secret at 0x7f00deadbeef")
    response = await connection.post(COMPLETIONS, {"prompt": "x"})
    assert (response.status, response.error["code"]) == (500, "internal_error")
    assert b"secret" not in response.body
    assert "secret" in caplog.text
    backend.refusal = None
    assert (await connection.post(COMPLETIONS, {"prompt": "x"})).status == 200
