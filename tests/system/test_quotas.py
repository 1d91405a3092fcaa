"""Keys with and without limits over the real processes, while one of them floods a worker with choices."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.system.completions import PACED
from tests.system.processes import Frontend, running, start_backend, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_REQUESTS = 16
NUM_PROBES = 4
FREE, LIMITED, OTHER = ({"authorization": f"Bearer sk-{name}"} for name in ("free", "limited", "other"))
KEYS = "sk-free\nsk-limited requests_in_flight=128 tokens_per_minute=400000\nsk-other\n"


class Server:
    def __init__(self, frontend: Frontend, key_file: Path) -> None:
        self.frontend = frontend
        self.url = f"{frontend.url}/v1/completions"
        self._key_file = key_file
        self._num_reloads = 0

    def reload(self, keys: str) -> None:
        self._key_file.write_text(keys)
        self.frontend.process.send_signal(signal.SIGHUP)
        self._num_reloads += 1
        self.frontend.wait_for("read the API keys again", count=self._num_reloads)

    @property
    def num_running(self) -> int:
        return int((self.frontend.ready() or {}).get("running", 0))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("quotas")
    key_file = directory / "keys"
    key_file.write_text(KEYS)
    socket = directory / "private" / "backend.sock"
    backend = start_backend(socket, *PACED, "--max-waiting", "4096")
    frontend = Frontend(socket, "--api-key-file", str(key_file))
    with running(frontend, backend):
        frontend.wait_ready()
        yield Server(frontend, key_file)
        frontend.wait_idle()


def fan_out(max_tokens: int, num_choices: int = 16) -> dict[str, Any]:
    """128 greedy choices, the same in each request, so that all of them listen to eight sequences."""
    prompts = [[5, 6, 7 + number] for number in range(8)]
    fields = {"n": num_choices, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"prompt": prompts, **fields}


async def test_choices_without_number_leave_the_worker_responsive(server: Server) -> None:
    began = asyncio.Event()
    num_bytes = 0

    async def flood(http: httpx.AsyncClient) -> None:
        nonlocal num_bytes
        async with http.stream("POST", server.url, json=fan_out(20_000), headers=FREE) as response:
            assert response.status_code == 200
            began.set()
            async for data in response.aiter_raw():
                num_bytes += len(data)

    async def probe(http: httpx.AsyncClient, path: str) -> None:
        for number in range(NUM_PROBES):
            if path:
                response = await http.get(f"{server.frontend.url}/{path}")
            else:
                # A prompt of its own each time, so that it joins nothing.
                body = {"prompt": [number + 1, 3], "max_tokens": 2, "temperature": 0}
                response = await http.post(server.url, json=body, headers=OTHER)
            assert response.status_code == 200

    async with httpx.AsyncClient(timeout=60.0, verify=False) as http:  # noqa: S501
        floods = [asyncio.create_task(flood(http)) for _ in range(NUM_REQUESTS)]
        await began.wait()
        # Nobody waits for the flood, which lasts for 20,000 steps of 4 ms, and the flood gets its tokens meanwhile.
        await asyncio.gather(*(probe(http, path) for path in ("health", "ready", "")))
        assert not any(task.done() for task in floods)
        assert num_bytes > 100_000
        cancelled = asyncio.create_task(probe(http, "health"))
        for task in floods:  # 2,048 streams are cancelled at once
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        await cancelled
    await asyncio.to_thread(server.frontend.wait_idle)


async def test_choices_are_in_flight_until_they_end_whatever_happens_to_the_key(server: Server) -> None:
    without = KEYS.replace("sk-limited ", "#")
    async with httpx.AsyncClient(timeout=60.0, verify=False) as http:  # noqa: S501

        async def ask(num_choices: int, max_tokens: int = 1) -> httpx.Response:
            body = {**fan_out(max_tokens, num_choices), "stream": False}
            return await http.post(server.url, json=body, headers=LIMITED)

        async with http.stream("POST", server.url, json=fan_out(2000, 15), headers=LIMITED) as held:
            assert (held.status_code, held.headers["x-ratelimit-remaining-tokens"]) == (200, str(400_000 - 240_024))
            refused = await ask(2)
            assert refused.status_code == 429
            assert "this key has 121 requests in flight with this one, whose choices need 15 more" in refused.text
            assert int(refused.headers["retry-after"]) >= 1
            too_many = await ask(1, 100_000)
            assert too_many.status_code == 400
            too_long = await ask(1, 25_000)
            assert (too_long.status_code, "max_tokens" in too_long.text) == (429, False)
            assert (await ask(1)).status_code == 200
            await asyncio.to_thread(server.reload, without)
            assert (await ask(1)).status_code == 401
            await asyncio.to_thread(server.reload, KEYS)
            assert (await ask(2)).status_code == 429
        # The held request is dropped: its choices are free again, and its tokens are settled.
        await asyncio.to_thread(wait_until, lambda: server.num_running == 0, 20.0)
        async with asyncio.timeout(20.0):  # the worker settles after the backend has dropped the request
            while (answer := await ask(16)).status_code == 429:
                pass
        assert answer.status_code == 200
        too_many = await ask(1, 60_000)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "max_tokens")
        await asyncio.to_thread(server.reload, KEYS.replace("=128", "=100"))
        too_many = await ask(16)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
