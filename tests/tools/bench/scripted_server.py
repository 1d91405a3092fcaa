"""A small HTTP server in the test's process whose every write the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.bench.load_generator.sending import send_one
from penstock.tools.bench.load_generator.stats import ObservedRequest
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.load_generator.workload import Drop, PlannedRequest

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
ONE_TOKEN = PlannedRequest("hello", 3)


def token(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%s","finish_reason":null}],"usage":null}\n\n' % text.encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the request line and the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head.split(b"\r\n")[0], await reader.readexactly(length)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Target]:
    """handler answers each POST; GET is answered as by a Penstock server."""
    connections: list[asyncio.Task[None]] = []

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while True:
                line, body = await read_request(reader)
                if line.startswith(b"GET /v1/models"):
                    writer.write(whole(200, b'{"data":[{"id":"m","vocab_size":64}]}'))
                else:
                    await handler(reader, writer, body)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = Target(HttpClient(f"http://127.0.0.1:{port}/v1"), "completions", "m", 64)
    try:
        yield target
    finally:
        target.http.close()
        server.close()
        await asyncio.gather(*connections)


async def send(target: Target, drop: Drop | None = None) -> ObservedRequest:
    return await send_one(target.http, target.encode(ONE_TOKEN), asyncio.get_running_loop().time(), drop)


def streams(*events: bytes) -> Handler:
    """Return a handler that answers each request with these events."""

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(STREAM_HEAD + b"".join(chunk(event) for event in events) + b"0\r\n\r\n")

    return handler
