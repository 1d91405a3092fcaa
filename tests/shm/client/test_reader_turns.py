"""Turns of readers: few are woken at once, and those of different requests in rotation."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from penstock.shm.client.streams.reader_turns import ReaderTurns
from penstock.shm.client.streams.token_stream import TokenBatch, TokenStream
from penstock.shm.messages import Finish, Generate, Sampling


def stream_of(turns: ReaderTurns, group: int, num_tokens: int) -> TokenStream:
    """A stream that has ended and holds num_tokens to read."""
    message = Generate(
        request_id=group, tokens=b"\0\0\0\0", num_prompt_tokens=1, max_tokens=10_000, sampling=Sampling()
    )
    stream = TokenStream(message, array("i", [1]), lambda *_: None, turns=turns, group=group)
    stream.tokens.extend(range(num_tokens))
    stream.end(Finish.LENGTH)
    return stream


async def test_readers_of_many_streams_share_the_loop_and_do_not_delay_another_request() -> None:
    now_s = 0.0
    turns = ReaderTurns(lambda: now_s)
    num_read = 0
    num_in_turns: list[int] = []
    ended: list[int] = []
    has_begun = asyncio.Event()

    async def read(stream: TokenStream) -> int:
        nonlocal num_read, now_s
        began_at = num_read
        async for batch in stream:
            assert len(batch.token_ids) <= 64
            num_read += 1
            if num_read == 100:
                has_begun.set()
            now_s += 0.0005  # detokenizing a batch holds the loop
        ended.append(stream.group)
        return num_read - began_at

    async def watch() -> None:
        while len(ended) < 201:
            before = num_read
            await asyncio.sleep(0)
            num_in_turns.append(num_read - before)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for _ in range(200):
            group.create_task(read(stream_of(turns, 1, 128)))
        await has_begun.wait()
        other = group.create_task(read(stream_of(turns, 2, 128)))
    assert sorted(ended) == [1] * 200 + [2]
    assert sum(num_in_turns) == 2 * 201
    # A turn begins with 32 readers. The limit halves after more than 8 ms, the time of 16 readers.
    assert max(num_in_turns) == 32
    assert max(num_in_turns[num_in_turns.index(32) + 2 :]) <= 20, num_in_turns
    assert other.result() <= 3 * 32


async def test_reader_that_is_cancelled_while_it_waits_does_not_stop_the_others() -> None:
    turns = ReaderTurns()
    streams = [stream_of(turns, number, 10) for number in range(8)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    readers[3].cancel()
    batches = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(batches[3], asyncio.CancelledError)
    assert [isinstance(batch, TokenBatch) and len(batch.token_ids) for batch in batches[:3] + batches[4:]] == [10] * 7


async def test_turn_of_a_cancelled_reader_gives_the_next_one_no_empty_batch() -> None:
    stream = stream_of(ReaderTurns(), 1, 10)
    stream.finish = Finish.NONE
    assert len((await anext(stream)).token_ids) == 10
    stream.tokens.append(5)
    cancelled = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    cancelled.cancel()
    stream.tokens.pop()
    reader = asyncio.ensure_future(anext(stream))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reader.done()
    stream.tokens.append(6)
    stream.wake_reader()
    assert (await reader).token_ids == [6]


async def test_cancelled_stream_gives_all_its_tokens_at_once() -> None:
    stream = stream_of(ReaderTurns(), 1, 1000)
    stream.finish = Finish.CANCELLED
    batch = await anext(stream)
    assert (len(batch.token_ids), batch.finish) == (1000, Finish.CANCELLED)


async def test_receiver_gets_tokens_instead_of_the_reader_until_it_refuses_or_the_stream_ends() -> None:
    turns = ReaderTurns()
    stream, received, takes = stream_of(turns, 1, 0), [], True
    stream.finish = Finish.NONE

    def receive(token_ids: list[int]) -> bool:
        received.extend(token_ids if takes else ())
        return takes

    stream.receive = receive
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for first in (0, 200):  # more tokens than one turn gives
        stream.tokens.extend(range(first, first + 200))
        stream.wake_reader()
        for _ in range(8):
            await asyncio.sleep(0)
    assert received == list(range(400))
    takes = False
    stream.tokens.append(400)
    stream.wake_reader()
    assert (await reader).token_ids == [400]
    takes, reader = True, asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.tokens.append(401)
    stream.end(Finish.LENGTH)
    batch = await reader
    assert (batch.token_ids, batch.finish, len(received)) == ([401], Finish.LENGTH, 400)


async def test_fault_of_a_receiver_reaches_its_reader_and_stops_no_other() -> None:
    turns = ReaderTurns()
    broken, other = stream_of(turns, 1, 0), stream_of(turns, 2, 0)
    readers = []
    for stream in (broken, other):
        stream.finish = Finish.NONE
        readers.append(asyncio.ensure_future(anext(stream)))
    broken.receive = {}.__getitem__  # type: ignore[assignment]
    await asyncio.sleep(0)
    for stream in (broken, other):
        stream.tokens.append(5)
        stream.wake_reader()
    with pytest.raises(TypeError):  # a list is no key
        await readers[0]
    assert (await readers[1]).token_ids == [5]
