"""Cancelling a stream at any moment ends it and frees the request in the backend."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from penstock.shm.client import BackendClient, BackendUnavailable
from penstock.shm.messages import Finish
from tests.shm.client.harness import LONG, at_base, connected, read, request, tokens_of, until
from tests.shm.scripted_backend import Script, ScriptedBackend, expected_tokens, model_card


async def test_cancelling_ends_the_stream_and_frees_the_backend(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 30_000))
            await anext(stream)
            stream.cancel()
            stream.cancel()
            _, last = await read(stream)
            assert last.finish is Finish.CANCELLED
            await until(lambda: not backend.engine.running)
            assert backend.engine.num_cancellations == 1
            stream.cancel()
            assert backend.engine.link.balance() == {"frontend": 1}


async def test_cancelling_wakes_a_waiting_reader(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 10))
            reader = asyncio.create_task(read(stream))
            await until(lambda: backend.engine.running)
            stream.cancel()
            tokens, last = await reader
            assert (tokens, last.finish) == ([], Finish.CANCELLED)
            await until(lambda: not backend.engine.running)


async def test_cancelling_before_anything_was_sent_is_normal(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            for _ in range(100):
                client.submit(request([1, 2], 10)).cancel()
            assert await tokens_of(client.submit(request([3], 5))) == expected_tokens([3], 5)
            await until(lambda: backend.engine.link.balance() == {"frontend": 1})


async def test_cancelling_after_the_end_is_normal(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 5))
            assert await tokens_of(stream) == expected_tokens([1, 2], 5)
            stream.cancel()
            await tokens_of(client.submit(request([3], 5)))
            assert backend.engine.num_cancellations == 0
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_cancelled_reader_task_leaves_the_stream_usable(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 10))
            reader = asyncio.create_task(read(stream))
            await until(lambda: backend.engine.running)
            reader.cancel()
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            await asyncio.gather(reader, return_exceptions=True)
            assert await tokens_of(stream) == expected_tokens([1, 2], 10)


async def test_closing_the_client_ends_its_streams_and_frees_the_backend(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        client = BackendClient(socket_path)
        await client.start()
        await until(lambda: client.ready)
        readers = [asyncio.create_task(read(client.submit(request([n], 30_000)))) for n in range(5)]
        await until(lambda: len(backend.engine.running) == 5)
        await client.close()
        assert [last.finish for _, last in await asyncio.gather(*readers)] == [Finish.CANCELLED] * 5
        await until(lambda: backend.engine.link.balance() == {})
        assert client.balance() == {}
        with pytest.raises(BackendUnavailable):
            client.submit(request([1], 1))


async def test_many_cancellations_leave_other_streams_whole_and_nothing_held(socket_path: Path) -> None:
    rng = random.Random(7)
    script = Script(model_card(max_context_tokens=LONG))
    with ScriptedBackend(socket_path, script) as backend:
        async with connected(socket_path) as client:

            async def one(n: int) -> None:
                prompt = [n % 1000] * rng.choice((1, 3, 50, 5000))
                await asyncio.sleep(rng.random() * 0.2)
                stream = client.submit(request(prompt, 50))
                if n % 2:
                    assert await tokens_of(stream) == expected_tokens(prompt, 50)
                    return
                if rng.random() < 0.7:
                    await anext(stream)
                await asyncio.sleep(rng.random() * 0.01)
                stream.cancel()
                async for batch in stream:
                    assert batch.finish in (Finish.CANCELLED, Finish.LENGTH)

            await asyncio.gather(*(one(n) for n in range(300)))
            await until(lambda: at_base(client))
            await until(lambda: backend.engine.link.balance() == {"frontend": 1})
            assert not backend.engine.running
            assert backend.engine.link.counters.faults == 0
            assert backend.engine.link.counters.blocked_sends == 0
