"""Admitted requests survive the backend: killed, stopped, hung or restarted, with more listeners than places."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.system.completions import SLOW, body, client, metric, read_stream
from tests.system.processes import Command, Frontend, backends_of, descendants, running, start_backend, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

FEW_PLACES = (*SLOW, "--max-running", "4", "--max-waiting", "8")
NUM_LISTENERS = 20
"""More than FEW_PLACES has places."""


def running_at(url: str) -> int:
    running: int = httpx.get(f"{url}/ready", verify=False).json().get("running", 0)  # noqa: S501
    return running


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


async def test_listeners_of_one_sequence_come_back_as_one_and_none_is_lost(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, *FEW_PLACES)
    frontends = [Frontend(socket), Frontend(socket)]

    def are_coalesced() -> bool:
        return metric(frontends[0], "penstock_requests_coalesced_total") == NUM_LISTENERS - 1

    with running(*frontends):
        for frontend in frontends:
            await in_thread(frontend.wait_ready)
        async with client() as http:
            request = body([5, 6, 7], 200)
            urls = [frontends[number % 2].url for number in range(NUM_LISTENERS)]
            listeners = [asyncio.create_task(read_stream(http, url, request)) for url in urls]
            await in_thread(wait_until, are_coalesced, 60.0)
            backend.kill()
            backend.close()
            backend = await in_thread(start_backend, socket, *FEW_PLACES)
            with running(backend):
                await in_thread(wait_until, are_coalesced, 60.0)
                ready = await in_thread(frontends[1].ready)
                assert ready["running"] + ready["waiting"] == 1
                texts = await asyncio.gather(*listeners)
                assert len(set(texts)) == 1
                # A worker that stalls longer than its lease registers anew, while the other one's streams go on.
                listeners = [
                    asyncio.create_task(read_stream(http, frontends[number % 2].url, body([5, 6, 8], 500)))
                    for number in range(6)
                ]
                await in_thread(wait_until, lambda: (frontends[0].ready() or {}).get("running") == 1, 60.0)
                (worker,) = descendants(frontends[1].process.pid)
                os.kill(worker, signal.SIGSTOP)
                await in_thread(backend.wait_for, "it took no output")
                os.kill(worker, signal.SIGCONT)
                assert len(set(await asyncio.gather(*listeners))) == 1


async def test_structured_requests_are_not_refused_again(tmp_path: Path) -> None:
    """They were admitted a few at a time. They come back all at once, more than grammars may wait to be compiled."""
    socket = tmp_path / "private" / "backend.sock"
    options = (*SLOW, "--max-running", "2", "--max-waiting", "10")
    backend = start_backend(socket, *options)
    frontend = Frontend(socket)
    with running(frontend):
        await in_thread(frontend.wait_ready)
        async with client() as http:

            async def ask(number: int) -> int:
                grammar = {"regex": f"[a-z ]{{{900 + number}}}"}
                num_tokens = 160 if number < 2 else 8  # the first two run until all others wait
                request = body([5, number], num_tokens, structured_outputs=grammar)
                return (await http.post(f"{frontend.url}/v1/completions", json=request)).status_code

            asks = []
            for number in range(12):
                asks.append(asyncio.create_task(ask(number)))
                places = number + 1

                def is_in(places: int = places) -> bool:
                    seen = frontend.ready() or {}
                    return bool(seen.get("running", 0) + seen.get("waiting", 0) >= places)

                await in_thread(wait_until, is_in, 60.0)
            backend.kill()
            backend.close()
            backend = await in_thread(start_backend, socket, *options)
            with running(backend):
                assert await asyncio.gather(*asks) == [200] * 12


async def test_no_request_fails_while_the_backend_restarts_or_the_frontend_starts(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    frontend = Frontend(socket, "--keep-alive-interval-s", "1")
    with running(frontend):
        async with client() as http:
            is_kept_alive = asyncio.Event()
            early = asyncio.create_task(read_stream(http, frontend.url, body([1, 2], 5), is_kept_alive))
            unstreamed = asyncio.create_task(http.post(f"{frontend.url}/v1/completions", json=body([1, 2], 5)))
            await asyncio.wait_for(is_kept_alive.wait(), 60.0)
            assert (await in_thread(frontend.get, "/ready")).status_code == 503
            backend = await in_thread(start_backend, socket, *SLOW)
            assert len(await early) > 0
            assert (await unstreamed).status_code == 200
            is_over = asyncio.Event()
            statuses: list[int] = []

            async def ask_again_and_again(number: int) -> None:
                while not is_over.is_set():
                    answer = await http.post(f"{frontend.url}/v1/completions", json=body([number, 3], 4))
                    statuses.append(answer.status_code)

            async def wait_answers(count: int) -> None:
                wanted = len(statuses) + count
                await in_thread(wait_until, lambda: len(statuses) >= wanted, 60.0)

            loops = [asyncio.create_task(ask_again_and_again(number)) for number in range(8)]
            for _ in range(2):
                await wait_answers(16)
                assert await in_thread(backend.terminate) == 0
                backend.close()
                backend = await in_thread(start_backend, socket, *SLOW)
            with running(backend):
                await wait_answers(16)
                is_over.set()
                await asyncio.gather(*loops)
    assert set(statuses) == {200}


async def test_hung_backend_is_replaced_and_its_streams_go_on(tmp_path: Path) -> None:
    serve = Command("penstock.main", "serve", *SLOW, "--port", "0", "--hang-timeout-s", "3")
    with running(serve):
        url = (await in_thread(serve.wait_for, r"^Ready: (http://\S+)/v1$")).group(1)
        async with client() as http:
            requests = [body([number, 6], 100, seed=number) for number in range(4)]
            alone = await asyncio.gather(*(read_stream(http, url, request) for request in requests))
            streams = [asyncio.create_task(read_stream(http, url, request)) for request in requests]
            await in_thread(wait_until, lambda: running_at(url) == 4, 60.0)
            (backend,) = await in_thread(backends_of, serve)
            os.kill(backend, signal.SIGSTOP)
            late = asyncio.create_task(read_stream(http, url, requests[0]))
            assert await asyncio.gather(*streams) == alone
            assert await late == alone[0]
        await in_thread(serve.wait_for, r"backend has shown no progress for \d+ s; killing it")
        await in_thread(serve.wait_for, "backend died by SIGKILL; restarting")
