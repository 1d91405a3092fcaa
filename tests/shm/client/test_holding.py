"""New requests wait while no backend is ready: a bounded number, for a bounded time, and then in their order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.shm.client import BackendClient, BackendUnavailable, TokenStream
from penstock.shm.messages import FailureCode, Finish
from tests.shm.client.harness import connected, read, request, tokens_of, until
from tests.shm.scripted_backend import Script, ScriptedBackend, expected_tokens, model_card


@asynccontextmanager
async def connected_and_lost(socket_path: Path, **options: Any) -> AsyncIterator[tuple[BackendClient, TokenStream]]:
    """A client that may hold one request, with one unfinished stream whose backend is dead."""
    client = BackendClient(socket_path, max_held=1, **options)
    await client.start()
    with ScriptedBackend(socket_path, Script(step_s=0.005)):
        await until(lambda: client.ready)
        stream = client.submit(request([1, 2], 300))
        await until(lambda: stream.has_tokens)
    await until(lambda: not client.ready)
    try:
        yield client, stream
    finally:
        await client.close()
        client.ledger.check()


async def looks(client: BackendClient, count: int) -> None:
    """Wait until the client has looked this often whether it may send what it holds."""
    is_ready, num_looks = client._held._is_ready, 0

    def is_ready_now() -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_ready()

    client._held._is_ready = is_ready_now
    await until(lambda: num_looks >= count)


async def test_requests_wait_for_the_first_backend_and_keep_their_order(socket_path: Path) -> None:
    client = BackendClient(socket_path, max_held=3)
    await client.start()
    streams = [client.submit(request([n], 5)) for n in range(3)]
    with pytest.raises(BackendUnavailable):
        client.submit(request([9], 5))
    assert client.retry_after_s >= 1
    streams[0].cancel()
    streams.append(client.submit(request([3], 5)))
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        await until(lambda: len(backend.engine.running) == 3)
        received = [running.submission.message for running in backend.engine.running.values()]
        assert [submit.request_id for submit in received] == [stream.request_id for stream in streams[1:]]
        assert all(submit.admitted_ns for submit in received)
        assert client.counters["requests_resumed"] == 0
        backend.engine.paused = False
        for stream in streams[1:]:
            prompt = stream.tokens[:1].tolist()
            assert await tokens_of(stream) == expected_tokens(prompt, 5)
        assert client.submit(request([1], 1)).admitted_ns == 0
    await client.close()
    client.ledger.check()


async def test_tenant_that_holds_many_requests_leaves_places_to_others(socket_path: Path) -> None:
    client = BackendClient(socket_path, max_held=4)
    await client.start()

    def submit(tenant: bytes) -> TokenStream:
        return client.submit(replace(request([1], 5), tenant=tenant))

    held = [submit(b"many") for _ in range(4)]
    held += [submit(tenant) for tenant in (b"few", b"few", b"other")]
    with pytest.raises(BackendUnavailable):
        submit(b"many")
    with ScriptedBackend(socket_path):
        for stream in held:
            assert await tokens_of(stream) == expected_tokens([1], 5)
    await until(lambda: not client.ready)
    held = [submit(b"many") for _ in range(4)]  # those that were sent have given their places back
    held[0].cancel()
    held.append(submit(b"many"))
    await client.close()
    client.ledger.check()


async def test_held_request_fails_after_its_time(socket_path: Path) -> None:
    client = BackendClient(socket_path, max_held=1, hold_timeout_s=0.1)
    await client.start()
    _, last = await read(client.submit(request([1], 5)))
    assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
    assert client.balance() == {}
    await client.close()


async def test_held_and_older_streams_have_their_own_limits(socket_path: Path) -> None:
    async with connected_and_lost(socket_path, resume_timeout_s=0.3, hold_timeout_s=30.0) as (client, older):
        held = client.submit(request([8], 5))
        _, last = await read(older)
        assert last.failure is FailureCode.UNAVAILABLE
        with ScriptedBackend(socket_path):
            assert await tokens_of(held) == expected_tokens([8], 5)


async def test_requests_wait_while_the_backend_hangs_and_go_when_it_continues(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path, max_held=2) as client:
            beat = backend.engine.board.beat
            backend.engine.board.beat = lambda: None  # type: ignore[method-assign]
            backend.engine.board.heartbeat_ns = 1
            await until(lambda: not client.ready)
            held = client.submit(request([4], 5))
            await looks(client, 2)
            assert held.is_queued
            assert not backend.engine.running
            backend.engine.board.beat = beat  # type: ignore[method-assign]
            assert await tokens_of(held) == expected_tokens([4], 5)
            assert client.counters["requests_resumed"] == 0


async def test_request_that_a_draining_backend_refused_runs_on_the_next_one(socket_path: Path) -> None:
    client = BackendClient(socket_path, max_held=1)
    await client.start()
    with ScriptedBackend(socket_path) as backend:
        await until(lambda: client.ready)
        backend.engine.paused = True
        running = client.submit(request([1, 2], 300))
        await until(lambda: backend.engine.running)
        submit = backend.engine._submit
        backend.engine._submit = lambda event: (  # type: ignore[method-assign] - the drain begins as they arrive
            setattr(backend.engine.board, "draining", 1) or submit(event)  # type: ignore[func-returns-value]
        )
        refused = client.submit(request([5], 5))
        await until(lambda: backend.engine.board.requests_rejected == 1 and refused.is_queued)
        assert running.finish is refused.finish is Finish.NONE
        with pytest.raises(BackendUnavailable):
            client.submit(request([7], 5))
    with ScriptedBackend(socket_path):
        assert await tokens_of(refused) == expected_tokens([5], 5)
        assert await tokens_of(running) == expected_tokens([1, 2], 300)
    await client.close()
    client.ledger.check()


async def test_held_requests_are_freed_when_the_client_cancels_or_closes(socket_path: Path) -> None:
    client = BackendClient(socket_path, max_held=2)
    await client.start()
    first, second = (client.submit(request([n], 5)) for n in range(2))
    first.cancel()
    assert client.balance() == {"stream": 1}
    await client.close()
    assert second.finish is Finish.CANCELLED
    client.ledger.check()


async def test_backend_with_another_model_does_not_receive_held_requests(socket_path: Path) -> None:
    async with connected_and_lost(socket_path) as (client, _):
        held = client.submit(request([8], 5))
        with ScriptedBackend(socket_path, Script(model_card(fingerprint="another"))):
            _, last = await read(held)
            assert last.failure is FailureCode.UNAVAILABLE
