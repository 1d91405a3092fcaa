"""Helpers for tests of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.shm.client import BackendClient, GenerationRequest, TokenBatch, TokenStream
from penstock.shm.messages import Finish, Sampling

ROOT = Path(__file__).parents[3]
GREEDY = Sampling(temperature=0.0)
LONG = 1 << 20
"""A context so long that an arena has only four slots, the minimum."""


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other threads and processes change it
            await asyncio.sleep(0.002)


def at_base(client: BackendClient) -> bool:
    """Only the connection is held; credits return a quarter of the window at a time."""
    return {kind for kind in client.balance() if kind != "credits_owed"} <= {"session"}


@asynccontextmanager
async def connected(socket_path: Path, **options: Any) -> AsyncIterator[BackendClient]:
    client = BackendClient(socket_path, **options)
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
        await until(lambda: at_base(client))
    finally:
        await client.close()
        client.ledger.check()


def request(prompt: list[int], max_tokens: int, *stop: int) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens, GREEDY, stop)


async def read(stream: TokenStream) -> tuple[list[int], TokenBatch]:
    """All tokens, and the last batch."""
    tokens: list[int] = []
    last = TokenBatch([])
    async for batch in stream:
        assert last.finish is Finish.NONE
        assert batch.token_ids or batch.finish
        tokens += batch.token_ids
        last = batch
    assert last.finish is not Finish.NONE
    return tokens, last


async def tokens_of(stream: TokenStream) -> list[int]:
    tokens, last = await read(stream)
    assert last.finish is Finish.LENGTH, last
    return tokens
