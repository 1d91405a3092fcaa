"""Numbers of clients on their boards, on the backend's board, and over reconnections."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.shm.client import BackendClient
from penstock.shm.memory.board import Board, FrontendBoard
from tests.shm.client.harness import at_base, connected, read, request, tokens_of, until
from tests.shm.scripted_backend import FAILING_TOKEN, Script, ScriptedBackend, expected_tokens


async def test_frontend_board_shows_its_counts_to_the_backend(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            await tokens_of(client.submit(request([1], 7)))
            await read(client.submit(request([FAILING_TOKEN], 5)))
            await until(lambda: at_base(client))
            (board,) = backend.engine.link.frontends.values()
            counted = {name: value for name, value in board.values().items() if value and "_us_" not in name}
            assert counted == {"pid": os.getpid(), "requests_length": 1, "requests_failed": 1, "tokens_streamed": 8}
            assert {"pid": os.getpid()} | client.counters == board.values()
            itl, sum_us = FrontendBoard.itl_us.read(board.values())
            assert sum(itl) == 6  # between the seven tokens of the first stream; the other had one
            assert sum_us > 0
            assert sum(FrontendBoard.queue_us.read(board.values())[0]) == 2
            assert client.backend_counters is not None
            assert client.backend_counters["generated_tokens"] == 8


async def test_tokens_that_arrive_together_share_the_time_since_the_token_before(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.shm.link.connected_frontend._MAX_HOLD_S", 60.0)
    with ScriptedBackend(socket_path, Script(step_s=0.01)) as backend:
        async with connected(socket_path) as client:
            batched = replace(request([1], 9), batch_delivery=True)
            batches = [batch async for batch in client.submit(batched)]
            assert [len(batch.token_ids) for batch in batches] == [1, 8]
            assert [token for batch in batches for token in batch.token_ids] == expected_tokens([1], 9)
            await until(lambda: at_base(client))
            (board,) = backend.engine.link.frontends.values()
            itl, sum_us = FrontendBoard.itl_us.read(board.values())
            assert sorted(itl)[-1] == sum(itl) == 8
            assert sum_us >= 8 * 10_000


async def test_backend_board_adds_up_all_frontends_including_departed_ones(socket_path: Path) -> None:
    def totals(client: BackendClient) -> dict[str, int]:
        counters = client.backend_counters or {}
        return {name.removeprefix(Board.TOTALS): value for name, value in counters.items()}

    with ScriptedBackend(socket_path):
        async with connected(socket_path) as stays:
            async with connected(socket_path) as goes:
                goes.board.count_response(200)
                stays.board.count_response(200)
                stays.board.count_response(777)
                await tokens_of(goes.submit(request([1], 7)))
                await tokens_of(stays.submit(request([2], 5)))
                await until(lambda: totals(stays)["tokens_streamed"] == 12)
                assert totals(stays)["frontends"] == 2
            await until(lambda: totals(stays)["frontends"] == 1)
            counted = totals(stays)
            assert counted["tokens_streamed"] == 12
            assert counted["requests_length"] == 2
            assert (counted["responses_200"], counted["responses_other"]) == (2, 1)
            assert sum(counted[word] for word in FrontendBoard.itl_us.words[:-1]) == 6 + 4


async def test_stream_counts_its_preemptions(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.002)) as backend:
        async with connected(socket_path) as client:
            streams = [client.submit(request([number], 30_000)) for number in range(2)]
            for stream in streams:
                await anext(stream)
            link = backend.engine.link
            (frontend,) = link.frontends
            for request_id in (streams[0].request_id, streams[0].request_id, 999):
                backend.engine.calls.append(partial(link.note_preemption, frontend, request_id))
            backend.engine.calls.append(partial(link.note_preemption, frontend + 1, 0))
            await until(lambda: [stream.num_preemptions for stream in streams] == [2, 0])
            for stream in streams:
                stream.cancel()


async def test_each_backend_receives_what_was_counted_since_the_previous_one(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    client.board.count_response(503)
    with ScriptedBackend(socket_path) as backend:
        await until(lambda: client.ready)
        await tokens_of(client.submit(request([1], 3)))
        (board,) = backend.engine.link.frontends.values()
        assert (board.responses_503, board.tokens_streamed, board.pid) == (1, 3, os.getpid())
    await until(lambda: client.backend_counters is None)
    client.board.count_response(503)
    with ScriptedBackend(socket_path) as backend:
        await until(lambda: client.ready)
        await tokens_of(client.submit(request([1], 2)))
        (board,) = backend.engine.link.frontends.values()
        assert (board.responses_503, board.tokens_streamed, board.requests_open) == (1, 2, 0)
    assert (client.counters["responses_503"], client.counters["tokens_streamed"]) == (2, 5)
    await client.close()
