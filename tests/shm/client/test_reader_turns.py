"""Turns of readers: few are woken at once, and those of different requests in rotation."""

from __future__ import annotations

import asyncio
import time
from array import array

from penstock.shm.client.reader_turns import ReaderTurns
from penstock.shm.client.stream import TokenStream
from penstock.shm.messages import Finish, Sampling, Submit


def stream_of(turns: ReaderTurns, group: int, num_tokens: int) -> TokenStream:
    """A stream that has ended and holds num_tokens to read."""
    submit = Submit(request_id=group, tokens=b"\0\0\0\0", num_prompt_tokens=1, max_tokens=10_000, sampling=Sampling())
    stream = TokenStream(submit, array("i", [1]), lambda *_: None, turns=turns, group=group)
    stream.tokens.extend(range(num_tokens))
    stream.end(Finish.LENGTH)
    return stream


async def test_readers_of_many_streams_share_the_loop_and_do_not_delay_another_request() -> None:
    turns = ReaderTurns()
    num_read, most_in_a_turn = 0, 0
    ended: list[int] = []
    has_begun = asyncio.Event()

    async def read(stream: TokenStream) -> int:
        nonlocal num_read
        began_at = num_read
        async for batch in stream:
            assert len(batch.token_ids) <= 64
            num_read += 1
            if num_read == 100:
                has_begun.set()
            time.sleep(0.0005)  # noqa: ASYNC251 - the time that detokenising a batch holds the loop
        ended.append(stream.group)
        return num_read - began_at

    async def watch() -> None:
        nonlocal most_in_a_turn
        while len(ended) < 201:
            before = num_read
            await asyncio.sleep(0)
            most_in_a_turn = max(most_in_a_turn, num_read - before)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for _ in range(200):
            group.create_task(read(stream_of(turns, 1, 128)))
        await has_begun.wait()
        other = group.create_task(read(stream_of(turns, 2, 128)))
    assert sorted(ended) == [1] * 200 + [2]
    # 400 batches in all. A turn begins with 32 readers and halves while it is long.
    assert most_in_a_turn <= 32
    assert other.result() <= 3 * 32


async def test_reader_that_is_cancelled_while_it_waits_does_not_stop_the_others() -> None:
    turns = ReaderTurns()
    streams = [stream_of(turns, number, 10) for number in range(8)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    readers[3].cancel()
    batches = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(batches[3], asyncio.CancelledError)
    assert all(
        len(batch.token_ids) == 10 for batch in batches[:3] + batches[4:] if not isinstance(batch, BaseException)
    )


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
