"""The client against the real link, with a scripted backend in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from shm.client import BackendClient, GenerationRequest, TokenStream
from shm.wire import Finish, Sampling
from tests.shm.scripted_backend import BackendProcess, ScriptedBackend, expected_tokens

GREEDY = Sampling(temperature=0.0)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other threads and processes bring it about
            await asyncio.sleep(0.002)


@asynccontextmanager
async def connected(socket_path: Path, **options: float) -> AsyncIterator[BackendClient]:
    client = BackendClient(socket_path, **options)
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
    finally:
        await client.close()
        client.ledger.check()


def request(prompt: list[int], max_tokens: int, *stop: int) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens, GREEDY, stop)


async def read(stream: TokenStream) -> tuple[list[int], Finish]:
    tokens: list[int] = []
    finish = Finish.NONE
    async for batch in stream:
        assert finish is Finish.NONE
        tokens += batch.token_ids
        finish = batch.finish
    return tokens, finish


async def test_tokens_arrive_in_order_and_complete(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1, n + 2] for n in range(50)]
            results = await asyncio.gather(*(read(client.submit(request(p, 40))) for p in prompts))
            assert results == [(expected_tokens(p, 40), Finish.LENGTH) for p in prompts]
            assert client.balance() == {"session": 1} | {
                k: v for k, v in client.balance().items() if k == "credits_owed"
            }
        await until(lambda: len(backend.engine.deaths) == 1)


async def test_a_killed_backend_is_replaced_and_streams_go_on(socket_path: Path) -> None:
    with BackendProcess(socket_path, step_s=0.005) as backend:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1] for n in range(8)]
            readers = [asyncio.create_task(read(client.submit(request(p, 100)))) for p in prompts]
            for _ in range(3):
                await asyncio.sleep(0.1)
                backend.restart()
            results = await asyncio.gather(*readers)
            assert results == [(expected_tokens(p, 100), Finish.LENGTH) for p in prompts]
