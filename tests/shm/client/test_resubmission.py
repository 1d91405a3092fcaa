"""Streams survive the death of their backend; a request that kills backends is isolated and given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.shm.client import BackendClient, TokenStream
from penstock.shm.messages import FailureCode, Finish
from tests.shm.client.harness import connected, read, request, tokens_of, until
from tests.shm.scripted_backend import (
    KILLING_TOKEN,
    BackendProcess,
    Script,
    ScriptedBackend,
    expected_tokens,
    model_card,
)


async def test_streams_go_on_after_their_backend_is_killed_and_restarted(socket_path: Path) -> None:
    with BackendProcess(socket_path, step_s=0.005) as backend:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1] for n in range(8)] + [[n] * 4090 for n in range(3)] + [[n] * 6000 for n in range(2)]
            streams = [client.submit(request(p, 150)) for p in prompts]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            for already in (20, 70, 110):
                shortest = min(streams, key=lambda stream: len(stream.tokens) - stream.num_prompt_tokens)
                await until(lambda s=shortest, a=already: len(s.tokens) - s.num_prompt_tokens >= a)
                backend.restart()
            assert await asyncio.gather(*readers) == [expected_tokens(p, 150) for p in prompts]
            assert client.counters["requests_resumed"] == 3 * len(prompts)


async def test_lost_message_is_noticed_and_the_stream_resumes_whole(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        async with connected(socket_path) as client:
            reader = asyncio.create_task(tokens_of(client.submit(request([1, 2], 200))))
            await until(lambda: client.board.tokens_streamed > 20)
            (frontend,) = backend.engine.link._frontends.values()
            frontend._next_sequence += 1
            assert await reader == expected_tokens([1, 2], 200)
            assert client.counters["requests_resumed"] == 1
            assert len(backend.engine.deaths) == 1


async def test_cancelled_stream_is_not_resubmitted(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path) as (client, streams):
        streams[0].cancel()
        _, last = await read(streams[0])
        assert last.finish is Finish.CANCELLED
        with ScriptedBackend(socket_path) as backend:
            assert await tokens_of(streams[1]) == expected_tokens([1, 2], 300)
            assert backend.engine.board.requests_accepted == 1
            assert backend.engine.num_cancellations == 0
            assert client.ready


@asynccontextmanager
async def connected_to_nothing_after_two_streams(
    socket_path: Path, **options: Any
) -> AsyncIterator[tuple[BackendClient, list[TokenStream]]]:
    """A client with two unfinished streams whose backend is dead."""
    client = BackendClient(socket_path, **options)
    await client.start()
    with BackendProcess(socket_path, step_s=0.005):
        await until(lambda: client.ready)
        streams = [client.submit(request([n, n + 1], 300)) for n in range(2)]
        await until(lambda: client.board.tokens_streamed > 10)
    await until(lambda: not client.ready)
    try:
        yield client, streams
    finally:
        await client.close()
        client.ledger.check()


async def test_streams_are_resubmitted_in_the_order_in_which_they_were_submitted(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path) as (_, streams):
        with ScriptedBackend(socket_path) as backend:
            backend.engine.paused = True
            await until(lambda: len(backend.engine.running) == 2)
            resubmitted = [request_id for _, request_id in backend.engine.running]
            assert resubmitted == [stream.request_id for stream in streams]


async def test_streams_fail_without_a_new_backend_in_time(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path, resume_timeout_s=0.05) as (client, streams):
        for stream in streams:
            _, last = await read(stream)
            assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
        assert client.balance() == {}


async def test_backend_with_another_model_does_not_continue_streams(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path) as (client, streams):
        with ScriptedBackend(socket_path, Script(model_card(fingerprint="another"))) as backend:
            for stream in streams:
                _, last = await read(stream)
                assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
            await until(lambda: client.ready)
            assert backend.engine.board.requests_accepted == 0
            assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)


async def test_request_that_kills_backends_is_given_up_and_others_finish(socket_path: Path) -> None:
    with BackendProcess(socket_path, step_s=0.02) as backend:
        async with connected(socket_path) as client:
            innocent = asyncio.create_task(tokens_of(client.submit(request([1, 2], 100))))
            await until(lambda: client.board.tokens_streamed > 3)
            poison = asyncio.create_task(read(client.submit(request([KILLING_TOKEN], 5))))
            while not poison.done():
                await asyncio.to_thread(backend.wait_for_death, 0.5)
                if not backend.alive:
                    backend.restart()
            _, last = await poison
            assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.INTERNAL)
            assert await innocent == expected_tokens([1, 2], 100)
