"""A small server of the completions API, run as a process of its own: python fake_peer.py PORT MODEL [STATUS].

It closes kept connections without notice, at the second request. With STATUS, it refuses completions.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


def stream(num_tokens: int) -> bytes:
    events = [b'{"choices":[{"text":"x"}]}'] * num_tokens
    events += [b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % num_tokens, b"[DONE]"]
    body = b"".join(b"data: %s\n\n" % event for event in events)
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        writer.write(await answer(reader))
        await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if head.startswith(b"get"):
        return whole(200, json.dumps({"data": [{"id": sys.argv[2]}]}).encode())
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    return whole(int(sys.argv[3]), b"refused") if len(sys.argv) > 3 else stream(body["max_tokens"])


async def main(port: int) -> None:
    server = await asyncio.start_server(serve_connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
