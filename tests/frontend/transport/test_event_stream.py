"""Events that several choices write at the same time are sent together, and none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend, request_bytes, silent, token_ids

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 4, "max_tokens": 9}


async def opened(connection: ClientConnection, backend: FakeBackend) -> list[bytes]:
    """Record the writes from now on."""
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, BODY))
    await backend.submitted.wait()
    writes: list[bytes] = []
    write = connection.transport.write

    def note(data: Any) -> None:
        writes.append(bytes(data))
        write(data)

    connection.transport.write = note  # type: ignore[method-assign]
    return writes


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_events_of_one_loop_turn_are_written_together(connection: ClientConnection, backend: FakeBackend) -> None:
    writes = await opened(connection, backend)
    for stream in backend.streams:
        stream.push(*token_ids("a"))
    await settled()
    assert len(writes) == 2  # the headers, and all choices' first events
    for stream in backend.streams[:3]:
        stream.push(*token_ids("b"))
    await settled()
    assert len(writes) == 3
    assert writes[2].count(b"data: ") == 3
    for stream in backend.streams:
        stream.push(*token_ids("c"), finish=Finish.LENGTH)
    response = await connection.response()
    texts = dict.fromkeys(range(4), "")
    for event in response.events()[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "abc", 1: "abc", 2: "abc", 3: "ac"}


async def test_events_before_a_failure_are_sent_before_it(connection: ClientConnection, backend: FakeBackend) -> None:
    await opened(connection, backend)
    for stream in backend.streams:
        stream.push(*token_ids("a"))
    await connection.output(b'"content":"a"')
    for stream in backend.streams[:3]:
        stream.push(*token_ids("b"))
    backend.streams[3].push(finish=Finish.FAILED)
    response = await connection.response()
    *chunks, error = response.events()
    contents = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert contents.count("a") == 4
    assert contents.count("b") == 3
    assert error["error"]["code"] == "internal_error"
    assert all(stream.cancelled.is_set() for stream in backend.streams[:3])


async def test_client_that_does_not_read_blocks_all_choices(connection: ClientConnection, backend: FakeBackend) -> None:
    writes = await opened(connection, backend)
    for stream in backend.streams:
        stream.push(*token_ids("a"))
    await settled()
    connection.transport.block()
    num_writes = len(writes)
    for text in "bcd":
        for stream in backend.streams:
            stream.push(*token_ids(text))
        await settled()
    assert len(writes) <= num_writes + 1
    connection.transport.reset()
    await connection.idle()
    assert all(stream.cancelled.is_set() for stream in backend.streams)
