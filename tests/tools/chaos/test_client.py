"""A client of the chaos against a small server whose every write the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.chaos.client import ChaosClient
from penstock.tools.chaos.ledger import Answer, ChoiceAnswer, Ending
from penstock.tools.chaos.plan import Act, Hangup, Recipe, Stage, Tenant
from penstock.tools.free_port import free_port

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

RECIPE = Recipe("two", "/v1/completions", {"model": "m", "prompt": "hello", "n": 2}, choices=2)
ACT = Act(7, RECIPE, Tenant("alice", "key-of-alice"), 0, is_stream=True, may_join=False, cache_salt="salt")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
CLOSE = b"0\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":1,"text":"b","token_ids":[2],"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"c","token_ids":[3],"finish_reason":"length"}]}\n\n',
)


def chunk(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in events)


def whole(status: int, body: bytes, headers: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n" % (status, len(body))
    return head + headers + b"\r\n" + body


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[ChaosClient]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = ChaosClient(HttpClient(f"http://127.0.0.1:{port}"))
        yield client
        client.http.close()
        await asyncio.sleep(0)  # an aborted transport closes in the next turn of the loop


async def perform(act: Act, answer: bytes) -> tuple[Ending, bytes]:
    """Return the ending, and the request as the server received it. The server hangs up after the answer."""
    received: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"}"))
        writer.write(answer)
        await writer.drain()

    async with serving(handler) as client:
        return await client.perform(act), received[0]


async def test_whole_stream_is_put_together_by_choice() -> None:
    ending, request = await perform(ACT, STREAM_HEAD + chunk(*EVENTS, USAGE, DONE) + CLOSE)
    assert ending.answer is not None
    assert ending.answer.choices == (ChoiceAnswer("ac", (1, 3), "length"), ChoiceAnswer("b", (2,), "stop"))
    assert (ending.answer.prompt_tokens, ending.answer.completion_tokens) == (4, 3)
    assert (ending.status, ending.fault, ending.is_dropped, ending.is_broken) == (200, "", False, False)
    assert b"Authorization: Bearer key-of-alice\r\n" in request
    assert b"X-Penstock-Coalesce: off\r\n" in request
    assert b'"cache_salt":"salt","stream":true' in request


async def test_whole_body_is_read() -> None:
    body = (
        b'{"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
    )
    ending, _ = await perform(replace(ACT, is_stream=False), whole(200, body))
    assert ending.answer is not None
    assert ending.answer.choices[0] == ChoiceAnswer("a", (1,), "stop")
    assert ending.fault == ""


MESSAGE = Recipe("message", "/v1/messages", {"messages": []})
MESSAGE_USAGE = b'"usage":{"input_tokens":3,"cache_read_input_tokens":4,"output_tokens":2}'
MESSAGE_BODY = (
    b'{"type":"message","content":[{"type":"text","text":"ab"}],"stop_reason":"max_tokens",%b}' % MESSAGE_USAGE
)
MESSAGE_EVENTS = (
    b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
    b'event: e\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}\n\n',
    b'event: e\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"b"}}\n\n',
    b'event: e\ndata: {"type":"message_delta","delta":{"stop_reason":"max_tokens"},%b}\n\n' % MESSAGE_USAGE,
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)
RESPONSE = Recipe("response", "/v1/responses", {"input": "hello"})
RESPONSE_BODY = (
    b'{"status":"incomplete","error":null,"output":[{"type":"message","content":[{"text":"ab"}]}],'
    b'"usage":{"input_tokens":7,"output_tokens":2}}'
)
RESPONSE_EVENTS = (
    b'event: e\ndata: {"type":"response.created","response":{"status":"in_progress","usage":null}}\n\n',
    b'event: e\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
    b'event: e\ndata: {"type":"response.output_text.delta","delta":"b"}\n\n',
    b'event: e\ndata: {"type":"response.output_text.done","text":"ab"}\n\n',
    b'event: e\ndata: {"type":"response.incomplete","response":%b}\n\n' % RESPONSE_BODY,
)


@pytest.mark.parametrize(
    ("recipe", "body", "events", "finish_reason"),
    [
        (MESSAGE, MESSAGE_BODY, MESSAGE_EVENTS, "max_tokens"),
        (RESPONSE, RESPONSE_BODY, RESPONSE_EVENTS, "incomplete"),
    ],
)
async def test_messages_and_responses_are_the_same_whole_and_streamed(
    recipe: Recipe, body: bytes, events: tuple[bytes, ...], finish_reason: str
) -> None:
    whole_one, _ = await perform(replace(ACT, recipe=recipe, is_stream=False), whole(200, body))
    streamed, request = await perform(replace(ACT, recipe=recipe), STREAM_HEAD + chunk(*events) + CLOSE)
    right = Answer((ChoiceAnswer("ab", (), finish_reason),), 7, 2, has_token_ids=False)
    assert whole_one.answer == streamed.answer == right
    assert whole_one.fault == streamed.fault == ""
    assert b"stream_options" not in request
    cut, _ = await perform(replace(ACT, recipe=recipe), STREAM_HEAD + chunk(*events[:-1]) + CLOSE)
    assert "without [DONE]" in cut.fault


async def test_refused_message_is_known_by_the_type_of_its_error() -> None:
    body = b'{"type":"error","error":{"type":"rate_limit_error","message":"m"}}'
    ending, _ = await perform(replace(ACT, recipe=MESSAGE), whole(429, body))
    assert (ending.code, ending.fault) == ("rate_limit_error", "")


@pytest.mark.parametrize(
    ("answer", "fault", "is_broken"),
    [
        (STREAM_HEAD + chunk(*EVENTS), "closed the connection too early", True),
        (STREAM_HEAD + chunk(*EVENTS, USAGE) + CLOSE, "without [DONE]", False),
        (STREAM_HEAD + chunk(b'data: {"error":{"message":"m","code":"c"}}\n\n', DONE) + CLOSE, "error event c", False),
        (STREAM_HEAD + chunk(b"data: nonsense\n\n", DONE) + CLOSE, "not an answer", False),
        (whole(502, b"<html>Bad Gateway"), "status 502", True),
        (whole(503, b"<html>No server is available"), "status 503", False),
        (b"", "closed the connection too early", True),
    ],
)
async def test_answer_that_is_not_whole_has_a_fault(answer: bytes, fault: str, is_broken: bool) -> None:
    ending, _ = await perform(ACT, answer)
    assert fault in ending.fault
    assert ending.is_broken == is_broken


async def test_connection_that_is_refused_has_a_fault_and_was_not_broken() -> None:
    ending = await ChaosClient(HttpClient(f"http://127.0.0.1:{free_port()}")).perform(ACT)
    assert "no connection" in ending.fault
    assert not ending.is_broken


async def test_refusal_is_known_by_status_code_and_retry_after() -> None:
    body = b'{"error":{"message":"m","type":"t","param":null,"code":"overloaded"}}'
    ending, _ = await perform(ACT, whole(429, body, b"retry-after: 3\r\n"))
    assert (ending.status, ending.code, ending.has_retry_after) == (429, "overloaded", True)
    assert (ending.answer, ending.fault) == (None, "")


@pytest.mark.parametrize("stage", list(Stage))
async def test_client_hangs_up_at_the_planned_stage(stage: Stage) -> None:
    request = asyncio.get_running_loop().create_future()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if stage is Stage.STREAMING:
            writer.write(STREAM_HEAD + chunk(EVENTS[0]))
        request.set_result(await reader.read())  # until the client hangs up

    async with serving(handler) as client:
        hangup = Hangup(stage, 0.05, after_events=1 if stage is Stage.STREAMING else 0)
        ending = await client.perform(replace(ACT, hangup=hangup))
        sent = await request
    assert ending.is_dropped
    assert ending.fault == ""
    head, separator, body = sent.partition(b"\r\n\r\n")
    is_whole = stage in (Stage.SENT, Stage.STREAMING)
    assert bool(head) == (stage is not Stage.CONNECTED)
    assert bool(separator) == (is_whole or stage is Stage.IN_BODY)
    assert body.endswith(b"}") == is_whole
    if stage is Stage.STREAMING:
        assert ending.answer is not None
        assert ending.answer.received_tokens == 1


async def test_slow_reader_reads_everything_in_the_end() -> None:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    ending, _ = await perform(replace(ACT, pause_s=0.2), STREAM_HEAD + chunk(*EVENTS, USAGE, DONE) + CLOSE)
    assert ending.fault == ""
    assert loop.time() - started_s < 60
