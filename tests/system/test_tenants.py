"""Tenants over the real processes: a flood delays no other key, and a huge prompt no short one. Steps are counted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.shm.client import BackendClient
from tests.system.completions import PACED
from tests.system.processes import Frontend, running, start_backend, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MAX_WAITING = 256
SMALL = ("--max-running", "16", "--max-batch-tokens", "64", "--max-waiting", str(MAX_WAITING))
FLOOD, HUGE_PROMPT = 400, 30_000
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
MANY_STEPS = 200
"""Far more than a request needs, and far fewer than the flood and the huge prompt take: over 6,000 and 460."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Frontend, Path]]:
    directory = tmp_path_factory.mktemp("tenants")
    (directory / "keys").write_text("one\ntwo weight=2\n")
    socket = directory / "private" / "backend.sock"
    backend = start_backend(socket, *PACED, *SMALL)
    frontend = Frontend(socket, "--api-key-file", str(directory / "keys"))
    with running(frontend, backend):
        frontend.wait_ready()
        yield frontend, socket


@pytest.fixture
async def board(served: tuple[Frontend, Path]) -> AsyncIterator[BackendClient]:
    """A client that sends nothing: it reads the backend's board."""
    client = BackendClient(served[1])
    await client.start()
    await asyncio.to_thread(wait_until, lambda: client.backend_counters is not None, 10.0)
    yield client
    await client.close()


def count(board: BackendClient, name: str) -> int:
    counters = board.backend_counters
    assert counters is not None
    return counters[name]


async def ask(http: httpx.AsyncClient, prompt: list[int], max_tokens: int, headers: dict[str, str]) -> dict[str, Any]:
    fields = {"max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True}
    response = await http.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def until(board: BackendClient, name: str, at_least: int) -> None:
    await asyncio.to_thread(wait_until, lambda: count(board, name) >= at_least, 30.0)


def client(frontend: Frontend) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=FLOOD + 10)
    return httpx.AsyncClient(base_url=frontend.url, timeout=60.0, limits=limits, verify=False)  # noqa: S501


async def stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_short_request_of_one_key_does_not_wait_for_the_flood_of_another(
    served: tuple[Frontend, Path], board: BackendClient
) -> None:
    """The flood fills the wait queue: its key gets a 429, and the other a place."""
    async with client(served[0]) as http:
        flood = [
            asyncio.create_task(ask(http, [1 + number % 250, 1 + number // 250, *range(60)], 400, ONE))
            for number in range(FLOOD)
        ]
        await until(board, "waiting", MAX_WAITING)
        refused = await http.post("/v1/completions", json={"prompt": [3]}, headers=ONE)
        assert refused.status_code == 429
        assert str(MAX_WAITING) in refused.json()["error"]["message"]
        before = count(board, "steps")
        answer = await ask(http, [7, 8, 9], 2, TWO)
        assert count(board, "steps") - before < MANY_STEPS
        assert count(board, "waiting") >= MAX_WAITING
        assert answer["usage"]["completion_tokens"] == 2
        await stop(*flood)
    served[0].wait_idle()


async def test_three_tokens_do_not_wait_for_a_huge_prompt(served: tuple[Frontend, Path], board: BackendClient) -> None:
    async with client(served[0]) as http:
        computed = count(board, "computed_tokens")
        huge = asyncio.create_task(ask(http, [number % 200 for number in range(HUGE_PROMPT)], 2, ONE))
        await until(board, "computed_tokens", computed + 100)
        before = count(board, "steps")
        await ask(http, [1, 2, 3], 2, ONE)
        assert count(board, "steps") - before < MANY_STEPS
        assert not huge.done()
        await stop(huge)
    served[0].wait_idle()
