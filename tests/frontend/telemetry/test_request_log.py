from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterator

import pytest

from penstock.frontend.endpoints.routes import RouteTable
from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.process.logs import LineHandler, set_up_logging
from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend, request_bytes, says, silent


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "", 0, text, (), None)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    handler = LineHandler(pipe[1])
    for number in range(100):
        handler.emit(record(f"line {number} \udc80"))
    handler.close()
    lines = os.read(pipe[0], 1 << 20).decode().splitlines()
    assert lines == [f"line {number} \\udc80" for number in range(100)]


def test_blocked_pipe_loses_lines_but_does_not_block() -> None:
    reading, writing = os.pipe()
    handler = LineHandler(writing, max_lines=10)
    for _ in range(1000):
        handler.emit(record("x" * 10_000))
    assert handler.num_dropped > 900
    output = bytearray()

    def drain() -> None:
        while part := os.read(reading, 1 << 20):
            output.extend(part)

    draining = threading.Thread(target=drain)
    draining.start()
    handler.close()
    os.close(writing)
    draining.join()
    os.close(reading)
    counted = sum(int(count) for count in re.findall(rb"(\d+) log lines were dropped", output))
    assert counted == handler.num_dropped


def test_log_line_is_written_as_json(pipe: tuple[int, int]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    handler = set_up_logging("info", as_json=True, fd=pipe[1])
    try:
        RequestLogEntry("r1", 10.0, "h1", 5, 2, "none", 11, 10.5, "stop", max_tokens=50).write(11.5, "4bf9")
        logging.getLogger("other").warning("hello %s", "you")
    finally:
        root.handlers, root.level = handlers, level
        handler.close()
    request, other = (json.loads(line) for line in os.read(pipe[0], 1 << 20).splitlines())
    assert (other["message"], other["level"]) == ("hello you", "WARNING")
    expected = {
        "request_id": "r1",
        "http_request_id": "h1",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "coalesced": "none",
        "completion_tokens": 11,
        "total_tokens": 16,
        "max_tokens": 50,
        "ttft_ms": 500.0,
        "prompt_tps": 10.0,
        "generation_tps": 10.0,
        "total_tps": 10.7,
        "latency_ms": 1500.0,
        "finish_reason": "stop",
        "trace_id": "4bf9",
    }
    assert expected.items() <= request.items()


async def logged(connection: ClientConnection, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    await connection.idle()
    (line,) = [item.message for item in caplog.records if item.name == "penstock.request"]
    return dict(re.findall(r"(\w+)=(\S+)", line))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answered_request_is_logged(
    connection: ClientConnection, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    response = await connection.post("/v1/completions", {"prompt": [1, 2, 3], "stream": stream})
    fields = await logged(connection, caplog)
    response_id = response.events()[0]["id"] if stream else response.json()["id"]
    assert fields["request_id"] == response_id
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["finish_reason"]) == ("3", "3", "stop")
    assert fields["max_tokens"] == "997"  # the rest of the context
    assert int(fields["completion_tokens"]) > 3
    assert all(float(fields[name]) > 0 for name in ("ttft_ms", "prompt_tps", "generation_tps", "latency_ms"))


async def test_cancelled_request_is_logged(
    connection: ClientConnection, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    backend.script = silent
    connection.send(request_bytes("POST", "/v1/completions", {"prompt": "x"}))
    await backend.submitted.wait()
    connection.transport.reset()
    fields = await logged(connection, caplog)
    assert (fields["finish_reason"], fields["completion_tokens"], fields["ttft_ms"]) == ("cancelled", "0", "-")


async def test_failed_request_is_logged(
    connection: ClientConnection, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    backend.script = says("x", finish=Finish.FAILED)
    assert (await connection.post("/v1/completions", {"prompt": "x"})).status == 500
    assert (await logged(connection, caplog))["finish_reason"] == "error"


async def test_path_cannot_inject_log_lines(
    connection: ClientConnection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_table: RouteTable, path: str) -> None:
        raise ZeroDivisionError(path)

    monkeypatch.setattr(RouteTable, "methods", fails)
    response = await connection.request("GET", "/a%0Ab%1B[2J" + "x" * 1000)
    assert response.status == 500
    (message,) = (record.getMessage() for record in caplog.records if record.name == "penstock.app")
    assert message.startswith('GET "/a\\nb\\u001b[2Jxx')
    assert len(message) < 150
