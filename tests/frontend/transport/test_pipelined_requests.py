"""A second request on a connection is answered after the first or not read at all, wherever the bytes are cut.

Bodies contain requests too: what a server answers before it has read a body, it must not read as a request.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.frontend.harness import ClientConnection, FakeBackend, make_app, says, token_ids

MAX_BODY_BYTES = 2000


def post(body: bytes, *, path: str = "/v1/completions", version: str = "1.1", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nhost: a\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunked(*parts: bytes, path: str = "/v1/completions", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\n{headers}transfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts,)) + b"0\r\n\r\n"


PLAIN, STREAM = b'{"prompt":"first","max_tokens":2}', b'{"prompt":"first","max_tokens":2,"stream":true}'
SECOND, SMUGGLED = post(PLAIN.replace(b"first", b"second")), post(PLAIN.replace(b"first", b"smuggled"))


@dataclass(frozen=True)
class First:
    """A first request. keeps: whether its connection serves another after it, if all of it came before."""

    data: bytes
    status: int
    keeps: bool = True


FIRSTS = {
    "answered": First(post(PLAIN), 200),
    "chunked": First(chunked(PLAIN[:5], PLAIN[5:]), 200),
    "streamed": First(post(STREAM), 200),
    "closing": First(post(PLAIN, headers="connection: close\r\n"), 200, keeps=False),
    "closing stream": First(post(STREAM, headers="connection: close\r\n"), 200, keeps=False),
    "HTTP/1.0": First(post(PLAIN, version="1.0"), 200, keeps=False),
    "HTTP/1.0 stream": First(post(STREAM, version="1.0"), 200, keeps=False),
    "HTTP/1.0 keep-alive": First(post(PLAIN, version="1.0", headers="connection: keep-alive\r\n"), 200, keeps=False),
    "no body": First(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n", 200),
    "body of a GET": First(post(SMUGGLED, path="/health").replace(b"POST", b"GET", 1), 200),
    "invalid": First(post(SMUGGLED), 400),
    "unknown path": First(post(SMUGGLED, path="/x"), 404),
    "unknown path, chunked": First(chunked(SMUGGLED, path="/x"), 404, keeps=False),
    "wrong method": First(post(SMUGGLED, path="/health"), 405),
    "wrong type": First(post(SMUGGLED, headers="content-type: text/plain\r\n"), 415),
    "too large": First(post(b"x" * MAX_BODY_BYTES + SMUGGLED), 413),
    "too large, chunked": First(chunked(b"x" * MAX_BODY_BYTES, SMUGGLED), 413),
    "very large": First(post(b"x" * (70 << 10) + SMUGGLED), 413, keeps=False),
    "expects": First(post(SMUGGLED, path="/x", headers="expect: 100-continue\r\n"), 404, keeps=False),
    "bad chunk": First(chunked(PLAIN).replace(b"\r\n0\r\n\r\n", b"\r\nzz\r\n") + SMUGGLED, 400, keeps=False),
    "two lengths": First(post(SMUGGLED, headers="content-length: 0\r\n"), 400, keeps=False),
    "length and chunks": First(post(b"0\r\n\r\n" + SMUGGLED, headers="transfer-encoding: chunked\r\n"), 400, False),
}  # fmt: skip


def responses_in(output: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of the responses. Fails if one is cut short."""
    found = []
    while output:
        head, end, output = output.partition(b"\r\n\r\n")
        assert end, head
        lines = head.lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        status = int(lines[0].split()[1])
        if status == 100:
            continue
        if b"content-length" in fields:
            length = int(fields[b"content-length"])
            assert len(output) >= length
            body, output = output[:length], output[length:]
        elif fields.get(b"transfer-encoding") == b"chunked":
            body = b""
            while True:
                size, _, output = output.partition(b"\r\n")
                part, mark, output = output[: int(size, 16)], output[int(size, 16) :][:2], output[int(size, 16) + 2 :]
                assert mark == b"\r\n"
                body += part
                if not part:
                    break
        else:
            body, output = output, b""
        found.append((status, body))
    return found


def is_complete(body: bytes) -> bool:
    return body.endswith(b"data: [DONE]\n\n") or json.loads(body) is not None


def prompts_of(backend: FakeBackend) -> list[str]:
    known = {tuple(token_ids(text)): text for text in ("first", "second", "smuggled")}
    return [known.get(tuple(stream.request.token_ids), "other") for stream in backend.streams]


async def settle(connection: ClientConnection) -> None:
    """Wait until the server has done what it can with what has arrived."""
    for _ in range(3):
        for _ in range(12):
            await asyncio.sleep(0)
        if connection.transport.closed:
            await connection.idle()


async def check(app: Any, backend: FakeBackend, first: First, cut: int, *, waits: bool) -> int:
    """Send a first and a second request, cut in two. Return the number of responses."""
    backend.streams.clear()
    connection = ClientConnection(app)
    data = first.data + SECOND
    connection.send(data[:cut])
    if waits:
        await settle(connection)
    connection.send(data[cut:])
    await settle(connection)
    is_closed = connection.transport.closed
    await connection.end()
    responses = responses_in(bytes(connection.transport.output))
    assert responses[0][0] == first.status
    assert all(is_complete(body) for _, body in responses)
    prompts = prompts_of(backend)
    assert "smuggled" not in prompts
    assert prompts.count("second") == len(responses) - 1 <= 1
    if len(responses) == 2:
        assert first.keeps
        assert responses[1][0] == 200
    else:
        assert is_closed
    return len(responses)


@pytest.mark.parametrize("name", FIRSTS)
async def test_second_request_is_answered_in_turn_or_not_read(name: str, backend: FakeBackend) -> None:
    first = FIRSTS[name]
    backend.script = says("the cat")
    app = make_app(backend, max_body_bytes=MAX_BODY_BYTES)
    end = len(first.data)
    head_ends = (first.data.index(b"\r\n\r\n") + 4, end, end + SECOND.index(b"\r\n\r\n") + 4)
    near = {place + offset for place in head_ends for offset in range(-4, 5)}
    far = {*range(1, min(end, 200), 7), *range(max(1, end - 120), end + len(SECOND), 7)}
    for cut in sorted(near | far):
        for waits in (False, True):
            try:
                number = await check(app, backend, first, cut, waits=waits)
            except AssertionError as error:
                error.add_note(f"cut at {cut} of {end} + {len(SECOND)}, waits: {waits}")
                raise
            if waits and cut == end and first.keeps:
                assert number == 2


async def test_requests_in_turn_are_all_answered(backend: FakeBackend) -> None:
    connection = ClientConnection(make_app(backend))
    for name in ("answered", "chunked", "streamed", "invalid", "unknown path", "body of a GET", "answered"):
        connection.send(FIRSTS[name].data)
        assert (await connection.response()).status == FIRSTS[name].status
    assert not connection.transport.closed
    await connection.end()
