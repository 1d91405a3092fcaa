"""A socket's transport as the server's protocol sees it, and what a client reads from it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httptools


class MockTransport(asyncio.Transport):
    """A socket's transport as the protocol sees it. `block` makes it a client that does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol | None = None
        self.output = bytearray()
        self.closed = False
        self.aborted = False
        self.blocked = False
        self.changed = asyncio.Event()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.1", 50000)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.output += data
            self.changed.set()

    def get_write_buffer_size(self) -> int:
        return len(self.output) if self.blocked else 0

    def block(self) -> None:
        self.blocked = True
        assert self.protocol is not None
        self.protocol.pause_writing()

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.changed.set()
            asyncio.get_running_loop().call_soon(self._lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def reset(self) -> None:
        """The client closes the connection."""
        self.closed = True
        self.changed.set()
        self._lost(ConnectionResetError())

    def _lost(self, error: Exception | None) -> None:
        assert self.protocol is not None
        self.protocol.connection_lost(error)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The client reads the end, and closes the connection."""
        self.close()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        numbers = {name for name, value in error.items() if type(value) is int}
        assert set(error) - numbers == {"message", "type", "param", "code"}
        return error

    def events(self) -> list[Any]:
        """Return the data of the server-sent events, [DONE] as a string, without comments."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in self.body.decode().split("\n\n") if block and not block.startswith(":")]
        assert all(block.startswith("data: ") for block in blocks)
        return [json.loads(block[6:]) if block[6:] != "[DONE]" else "[DONE]" for block in blocks]


class ResponseReader:
    """Parser callbacks that collect whole responses."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.headers, self.body = {}, bytearray()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert name.decode().lower() not in self.headers
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.responses.append(Response(self.parser.get_status_code(), self.headers, bytes(self.body)))
