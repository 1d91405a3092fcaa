"""Deadlines of streams, kept by the backend or, if it is dead or hangs, by the client."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.messages import Finish, PromptHeader
from tests.shm.client.harness import GREEDY, connected, read, request, tokens_of, until
from tests.shm.scripted_backend import BackendProcess, ScriptedBackend, ScriptedEngine, expected_tokens


def expiring(prompt: list[int], max_tokens: int, in_s: float) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens, GREEDY, deadline_s=time.monotonic() + in_s)


def submits_of(engine: ScriptedEngine) -> list[PromptHeader]:
    return [running.submission.message for running in engine.running.values()]


@pytest.mark.parametrize("length", [3, 5000])
async def test_request_fields_reach_the_backend_inline_and_through_the_arena(socket_path: Path, length: int) -> None:
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            fields = {"salt": b"a tenant", "may_share": True, "priority": -3, "deadline_s": time.monotonic() + 1000}
            fields |= {"tenant": b"payer", "weight": 2.5}
            stream = client.submit(GenerationRequest([1] * length, 5, GREEDY, **fields))  # type: ignore[arg-type]
            await until(lambda: backend.engine.running)
            (submit,) = submits_of(backend.engine)
            assert (submit.salt, submit.may_share, submit.priority) == (b"a tenant", True, -3)
            assert (submit.tenant, submit.weight) == (b"payer", 2.5)
            assert 990_000 < submit.timeout_ms <= 1_000_000
            stream.cancel()


async def test_passed_deadline_ends_the_stream_before_it_is_sent(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            tokens, last = await read(client.submit(expiring([1], 5, in_s=-1.0)))
            assert (tokens, last.finish) == ([], Finish.EXPIRED)
            assert client.counters["requests_expired"] == 1
            assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)
            assert backend.engine.board.requests_accepted == 1


async def test_client_cancels_when_the_backend_misses_a_deadline(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(expiring([1], 30_000, in_s=0.05))
            tokens, last = await read(stream)
            assert last.finish is Finish.EXPIRED
            assert tokens == expected_tokens([1], len(tokens))
            await until(lambda: not backend.engine.running)
            assert backend.engine.num_cancellations == 1


async def test_deadline_ends_a_stream_without_a_backend(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    with BackendProcess(socket_path, step_s=0.005):
        await until(lambda: client.ready)
        stream = client.submit(expiring([1], 10_000, in_s=0.3))
    tokens, last = await read(stream)
    assert last.finish is Finish.EXPIRED
    assert tokens == expected_tokens([1], len(tokens))
    assert client.counters["requests_open"] == 0
    await client.close()


async def test_next_backend_receives_the_remaining_time(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    with BackendProcess(socket_path, step_s=0.005):
        await until(lambda: client.ready)
        stream = client.submit(expiring([1], 10_000, in_s=1000.0))
        await until(lambda: client.board.tokens_streamed)
        began_s = time.monotonic()
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        await until(lambda: backend.engine.running)
        (submit,) = submits_of(backend.engine)
        passed_ms = 1000 * (time.monotonic() - began_s)
        assert 1_000_000 - passed_ms - 30_000 < submit.timeout_ms < 1_000_000
        stream.cancel()
        await client.close()
