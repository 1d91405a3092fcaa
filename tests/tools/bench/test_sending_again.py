"""Requests on kept connections that the server has closed without notice."""

from __future__ import annotations

import asyncio

import pytest

from penstock.tools.bench.load_generator.sending import ask_whole, measure
from penstock.tools.bench.load_generator.stats import Outcome
from penstock.tools.bench.load_generator.workload import Drop, Lengths, Workload
from tests.tools.bench.scripted_server import (
    DONE,
    ONE_TOKEN,
    STREAM_HEAD,
    USAGE,
    chunk,
    send,
    serving,
    token,
    whole,
)

ANSWER = STREAM_HEAD + chunk(token("a") + USAGE + DONE) + b"0\r\n\r\n"


class ClosingServer:
    """Answers the first request of a connection; at the next one it writes last_words and closes."""

    def __init__(self, answer: bytes = ANSWER, last_words: bytes = b"") -> None:
        self.num_requests = 0
        self._answer = answer
        self._last_words = last_words
        self._seen: set[asyncio.StreamWriter] = set()

    async def __call__(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        self.num_requests += 1
        if writer not in self._seen:
            self._seen.add(writer)
            writer.write(self._answer)
            return
        writer.write(self._last_words)
        writer.close()


async def test_request_on_a_connection_that_the_server_closed_is_sent_again() -> None:
    server = ClosingServer()
    async with serving(server) as target:
        summary = await measure(target, Workload(Lengths(1, 1), Lengths(3, 3)), 6, 2, seed=0)
    assert (summary.completed, summary.failed) == (6, 0)
    assert summary.sent_again == server.num_requests - 6 > 0


async def test_request_for_a_whole_answer_is_sent_again() -> None:
    server = ClosingServer(whole(200, b"an answer"))
    async with serving(server) as target:
        for _ in range(2):
            assert await ask_whole(target.http, target.encode(ONE_TOKEN)) == b"an answer"
    assert server.num_requests == 3


async def test_new_connection_that_is_closed_without_an_answer_fails() -> None:
    num_requests = 0

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        nonlocal num_requests
        num_requests += 1
        writer.close()

    async with serving(handler) as target:
        records = [await send(target), await send(target)]
    assert [(record.outcome, record.times_sent) for record in records] == [(Outcome.FAILED, 1)] * 2
    assert num_requests == 2


async def test_request_is_sent_again_only_once() -> None:
    answers = [ANSWER]

    async def handler(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        if answers:
            writer.write(answers.pop())
        else:
            writer.close()

    async with serving(handler) as target:
        first, second = await send(target), await send(target)
    assert (first.outcome, first.times_sent) == (Outcome.COMPLETED, 1)
    assert (second.outcome, second.times_sent) == (Outcome.FAILED, 2)


@pytest.mark.parametrize("last_words", [b"H", STREAM_HEAD, STREAM_HEAD + chunk(token("a"))])
async def test_request_is_not_sent_again_once_its_answer_has_begun(last_words: bytes) -> None:
    server = ClosingServer(last_words=last_words)
    async with serving(server) as target:
        first, second = await send(target), await send(target)
    assert first.outcome is Outcome.COMPLETED
    assert (second.outcome, second.times_sent) == (Outcome.FAILED, 1)
    assert server.num_requests == 2


async def test_request_that_was_sent_again_is_dropped_as_planned() -> None:
    noticed = asyncio.Event()
    num_requests = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _body: bytes) -> None:
        nonlocal num_requests
        num_requests += 1
        if num_requests == 1:
            writer.write(ANSWER)
        elif num_requests == 2:
            writer.close()
        else:
            writer.write(STREAM_HEAD + chunk(token("a")))
            try:
                await reader.readexactly(1)
            finally:
                noticed.set()

    async with serving(handler) as target:
        await send(target)
        record = await send(target, Drop(1, 0.0))
        await noticed.wait()
    assert (record.outcome, record.times_sent, record.output_tokens) == (Outcome.DROPPED, 2, 1)
