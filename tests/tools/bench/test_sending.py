"""The load generator against a small server whose every write the test controls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HttpClient
from penstock.tools.bench.load_generator.sending import measure, run_all, run_closed_loop, run_open_loop, warm_up
from penstock.tools.bench.load_generator.stats import Outcome
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.load_generator.workload import Drop, Lengths, PlannedRequest, Workload
from penstock.tools.bench.options import PromptOptions
from penstock.tools.bench.serving.interference import running_streams
from tests.tools.bench.scripted_server import (
    DONE,
    ONE_TOKEN,
    STREAM_HEAD,
    USAGE,
    chunk,
    send,
    serving,
    streams,
    token,
    whole,
)


async def test_events_get_their_time_stamp_when_they_arrive() -> None:
    arrived_s: list[float] = []
    next_event = asyncio.Event()
    sent = asyncio.Semaphore(0)

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(STREAM_HEAD)
        for text in "abc":
            # The clock is read after the last event arrived and before this one is sent.
            arrived_s.append(asyncio.get_running_loop().time())
            writer.write(chunk(token(text)))
            sent.release()
            await next_event.wait()
            next_event.clear()
        writer.write(chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n")

    async with serving(handler) as target:
        task = asyncio.create_task(send(target))
        for count in (1, 2, 3):
            await sent.acquire()
            assert len(arrived_s) == count
            for _ in range(20):  # the event crosses the loopback interface
                await asyncio.sleep(0)
            next_event.set()
        record = await task
    assert record.outcome is Outcome.COMPLETED
    assert (record.prompt_tokens, record.output_tokens) == (7, 3)
    first, second, third = record.event_times_s
    assert (
        record.started_s <= arrived_s[0] <= first <= arrived_s[1] <= second <= arrived_s[2] <= third <= record.ended_s
    )


@pytest.mark.parametrize("separator", [b"\n\n", b"\r\n\r\n"])
async def test_events_may_be_cut_anywhere(separator: bytes) -> None:
    events = (token("a") + token("é") + USAGE + DONE).replace(b"\n\n", separator)
    async with serving(streams(*(events[i : i + 1] for i in range(len(events))))) as target:
        record = await send(target)
    assert record.outcome is Outcome.COMPLETED
    assert len(record.event_times_s) == 2


async def test_events_without_text_do_not_count_as_tokens() -> None:
    chat_role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    chat_text = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    async with serving(streams(b": keep-alive\n\n", chat_role, chat_text, token(""), DONE)) as target:
        record = await send(target)
    assert len(record.event_times_s) == 1
    assert record.output_tokens == 1  # no usage was sent


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((token("a"),), "without [DONE]"),
        ((token("a"), b'data: {"error":{"message":"backend gone"}}\n\n', DONE), "backend gone"),
        ((b"data: nonsense\n\n", DONE), "nonsense"),
    ],
)
async def test_stream_that_ends_badly_fails(events: tuple[bytes, ...], reason: str) -> None:
    async with serving(streams(*events)) as target:
        record = await send(target)
    assert record.outcome is Outcome.FAILED
    assert reason in record.error


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (whole(429, b'{"error":{"message":"full"}}'), "status 429"),
        (whole(200, b"{}"), "not an event stream"),
        (b"SSH-2.0-x\r\n", "the answer is not HTTP"),
    ],
)
async def test_answer_that_is_not_an_event_stream_fails_with_the_reason(answer: bytes, reason: str) -> None:
    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(answer)

    async with serving(handler) as target:
        record = await send(target)
    assert record.outcome is Outcome.FAILED
    assert reason in record.error


async def test_connection_closed_early_fails() -> None:
    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(STREAM_HEAD + chunk(token("a")))
        await writer.drain()
        writer.close()

    async with serving(handler) as target:
        record = await send(target)
    assert record.outcome is Outcome.FAILED
    assert len(record.event_times_s) == 1


@pytest.mark.parametrize(("after_events", "sent"), [(0, 0), (2, 2), (2, 3)])
async def test_dropped_request_closes_its_connection_mid_stream(after_events: int, sent: int) -> None:
    noticed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(STREAM_HEAD + b"".join(chunk(token("a")) for _ in range(sent)))
        try:
            await reader.readexactly(1)
        finally:
            noticed.set()

    async with serving(handler) as target:
        # The delay never ends, so only the next event can end the stream.
        delay_s = 0.0 if sent <= after_events else 1e6
        record = await send(target, Drop(after_events, delay_s))
        await noticed.wait()
    assert record.outcome is Outcome.DROPPED
    assert record.output_tokens == sent


async def test_cancelled_client_hangs_up() -> None:
    noticed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(STREAM_HEAD + chunk(token("a")))
        try:
            await reader.readexactly(1)
        finally:
            noticed.set()

    async with serving(handler) as target:
        async with running_streams(target, [ONE_TOKEN] * 2) as records:
            assert [len(record.event_times_s) for record in records] == [1, 1]
        await noticed.wait()


async def test_running_streams_raises_if_a_stream_ends() -> None:
    async with serving(streams(USAGE, DONE)) as target:
        with pytest.raises(BenchError, match="ended too soon"):
            async with running_streams(target, [ONE_TOKEN]):
                pytest.fail("no stream runs")


async def test_run_all_raises_if_an_answer_is_short() -> None:
    async with serving(streams(token("a"), USAGE, DONE)) as target:
        await run_all(target, [ONE_TOKEN])
        with pytest.raises(BenchError, match="3 tokens instead of 4"):
            await run_all(target, [PlannedRequest("hello", 4)])


async def test_stream_that_ends_before_its_planned_drop_counts_as_dropped() -> None:
    async with serving(streams(token("a"), USAGE, DONE)) as target:
        record = await send(target, Drop(5, 0.0))
    assert record.outcome is Outcome.DROPPED


async def test_closed_loop_keeps_its_clients_busy_and_reuses_connections() -> None:
    running, most, ports = 0, 0, set()

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        nonlocal running, most
        ports.add(writer.get_extra_info("peername"))
        running += 1
        most = max(most, running)
        for _ in range(20):  # the requests of the other clients arrive
            await asyncio.sleep(0)
        running -= 1
        writer.write(STREAM_HEAD + chunk(token("a") + DONE) + b"0\r\n\r\n")

    async with serving(handler) as target:
        records = await run_closed_loop(target, [ONE_TOKEN] * 12, 3)
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 12
    assert most == len(ports) == 3


async def test_open_loop_sends_when_due_while_others_run() -> None:
    release = asyncio.Event()
    seen = 0

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            release.set()
        await release.wait()
        writer.write(STREAM_HEAD + chunk(token("a") + DONE) + b"0\r\n\r\n")

    async with serving(handler) as target:
        requests = [PlannedRequest("x", 1, due_s) for due_s in (0.0, 0.001, 0.001, 0.004)]
        records = await run_open_loop(target, requests)
    starts_s = [record.started_s - records[0].started_s for record in records]
    assert starts_s == pytest.approx([0.0, 0.001, 0.001, 0.004])
    assert all(record.outcome is Outcome.COMPLETED for record in records)


async def test_request_body_has_the_planned_values() -> None:
    bodies: list[bytes] = []

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        bodies.append(body)
        writer.write(STREAM_HEAD + chunk(token("a") + USAGE + DONE) + b"0\r\n\r\n")

    async with serving(handler) as target:
        summary = await measure(target, Workload(Lengths(5, 5), Lengths(9, 9), vocab_size=64), 2, 1, seed=3)
    assert summary.load == "c=1"
    assert summary.output_tokens == 6
    body = msgspec.json.decode(bodies[0])
    assert len(body["prompt"]) == 5
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "ignore_eos", "stream")} == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"temperature": 0.0}),
        ({"top_k": 40, "top_p": 0.9, "logprobs": 5}, {"temperature": 0.0, "top_k": 40, "top_p": 0.9, "logprobs": 5}),
        (
            {"temperature": 0.8, "presence_penalty": 1.0, "logprobs": 2, "endpoint": "chat"},
            {"temperature": 0.8, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 2},
        ),
    ],
)
async def test_requests_sample_as_the_options_say(options: dict[str, Any], fields: dict[str, Any]) -> None:
    bodies: list[bytes] = []

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        bodies.append(body)
        writer.write(STREAM_HEAD + chunk(token("a") + USAGE + DONE) + b"0\r\n\r\n")

    async with serving(handler) as target:
        sampled = replace(target, sampling=PromptOptions(**options).sampling())
        await measure(sampled, Workload(Lengths(5, 5), Lengths(9, 9), vocab_size=64), 1, 1, seed=3)
    body = msgspec.json.decode(bodies[0])
    named = ("temperature", "top_k", "top_p", "presence_penalty", "logprobs", "top_logprobs")
    assert {name: body[name] for name in named if name in body} == fields


async def test_discover_finds_the_model_or_names_the_offered_ones() -> None:
    async with serving(streams(DONE)) as target:
        found = await Target.discover(target.http, "chat", None)
        assert (found.model, found.vocab_size) == ("m", 64)
        with pytest.raises(BenchError, match=r"offers \[m\], not other"):
            await Target.discover(target.http, "chat", "other")


async def test_failed_connection_names_the_server() -> None:
    http = HttpClient("http://127.0.0.1:1")
    with pytest.raises(ConnectionBroken, match=r"127\.0\.0\.1:1"):
        await http.connect()


async def test_warm_up_raises_if_every_request_fails() -> None:
    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(whole(503, b"{}"))

    async with serving(handler) as target:
        with pytest.raises(BenchError, match="status 503"):
            await warm_up(target, Workload(Lengths(1, 1), Lengths(1, 1)), 2, 2, seed=0)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "https://x", "ftp://x", "http://"])
def test_address_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        HttpClient(url)
