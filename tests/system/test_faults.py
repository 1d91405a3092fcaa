"""The real processes with the fake pass at the speed of a device, while clients and processes die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.process.children import module_argv
from tests.system.completions import SLOW, body, client, metric, read_stream
from tests.system.processes import REPOSITORY, Frontend, descendants, running, start_backend, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pair:
    """One backend and two frontends, each on its own port."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.backend = start_backend(socket, *SLOW)
        self.frontends = [Frontend(socket), Frontend(socket)]

    def restart_backend(self) -> None:
        self.backend.kill()
        self.backend.close()
        self.backend = start_backend(self.socket, *SLOW)


@pytest.fixture(scope="module")
def lasting_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("faults") / "private" / "backend.sock")
    with running(*pair.frontends):
        yield pair
    assert pair.backend.terminate() == 0
    assert "Traceback" not in pair.backend.output
    pair.backend.close()


@pytest.fixture
def pair(lasting_pair: Pair) -> Iterator[Pair]:
    """One set for all tests; each test must leave it as it was."""
    for frontend in lasting_pair.frontends:
        frontend.wait_ready()
    yield lasting_pair
    for frontend in lasting_pair.frontends:
        frontend.wait_ready()
        frontend.wait_idle()


async def test_requests_dropped_at_random_moments_leave_nothing_behind(pair: Pair) -> None:
    rng = random.Random(0)
    url = pair.frontends[0].url
    kept_alone: dict[int, str] = {}

    async def one(http: httpx.AsyncClient, number: int, gate: asyncio.Semaphore) -> str | None:
        prompt = [number % 50 + 1] * (1 + number % 90)
        async with gate:
            if number % 2:
                return await read_stream(http, url, body(prompt, 8 + number % 10))
            is_streaming = number % 4 == 0
            request = http.post(f"{url}/v1/completions", json=body(prompt, 400, stream=is_streaming))
            try:
                await asyncio.wait_for(request, rng.uniform(0.0, 0.3))
            except TimeoutError:
                return None
            raise AssertionError("400 tokens came in 0.3 s of 20 ms steps")

    async with client() as http:
        gate = asyncio.Semaphore(100)
        texts = await asyncio.gather(*(one(http, number, gate) for number in range(500)))
        for number in (1, 77, 255, 499):
            prompt = [number % 50 + 1] * (1 + number % 90)
            kept_alone[number] = await read_stream(http, pair.frontends[1].url, body(prompt, 8 + number % 10))
    assert sum(text is not None for text in texts) == 250
    assert {number: texts[number] for number in kept_alone} == kept_alone


async def test_killed_frontend_ends_only_its_own_streams(pair: Pair) -> None:
    doomed, other = pair.frontends
    (worker,) = descendants(doomed.process.pid)
    async with client() as http:
        # Long enough that all are still running when the test looks at them.
        alone = await asyncio.gather(*(read_stream(http, other.url, body([number, 5], 200)) for number in range(8)))
        lost = [asyncio.create_task(read_stream(http, doomed.url, body([9, number], 600))) for number in range(16)]
        kept = [asyncio.create_task(read_stream(http, other.url, body([number, 5], 200))) for number in range(8)]
        wait_ready = asyncio.to_thread(wait_until, lambda: (other.ready() or {}).get("running", 0) >= 24, 60.0)
        await wait_ready
        os.kill(worker, signal.SIGKILL)
        assert await asyncio.gather(*kept) == alone
        assert all(isinstance(end, Exception) for end in await asyncio.gather(*lost, return_exceptions=True))
    # The frontend's parent starts another worker on the same port; the fixture waits for it.


async def test_streams_resume_after_the_backend_is_killed(pair: Pair) -> None:
    frontend = pair.frontends[0]
    async with client() as http:
        requests = [body([number, 6], 100) for number in range(4)]
        alone = await asyncio.gather(*(read_stream(http, frontend.url, request) for request in requests))
        streams = [asyncio.create_task(read_stream(http, frontend.url, request)) for request in requests]
        await asyncio.to_thread(wait_until, lambda: (frontend.ready() or {}).get("running", 0) == 4, 60.0)
        await asyncio.to_thread(pair.restart_backend)
        assert await asyncio.gather(*streams) == alone


async def test_stopped_backend_turns_ready_red_and_back(pair: Pair) -> None:
    frontend = pair.frontends[0]
    pair.backend.process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(wait_until, lambda: frontend.ready() is None, 60.0)
    async with client() as http:
        assert (await http.get(f"{frontend.url}/health")).status_code == 200
        held = asyncio.create_task(http.post(f"{frontend.url}/v1/completions", json=body([1], 4)))
        await asyncio.to_thread(wait_until, lambda: metric(frontend, "penstock_worker_streams_open") == 1, 60.0)
        assert not held.done()
        pair.backend.process.send_signal(signal.SIGCONT)
        assert (await held).status_code == 200


async def test_terminated_frontend_finishes_its_streams_first(pair: Pair) -> None:
    frontend = Frontend(pair.socket)
    with running(frontend):
        await asyncio.to_thread(frontend.wait_ready)
        async with client() as http:
            stream = asyncio.create_task(read_stream(http, frontend.url, body([3, 3], 100)))
            await asyncio.to_thread(wait_until, lambda: (pair.frontends[1].ready() or {}).get("running", 0) == 1, 60.0)
            frontend.process.terminate()
            assert len(await stream) > 0
        assert await asyncio.to_thread(frontend.status) == 0


async def test_queued_requests_wait_and_a_disconnected_one_is_removed(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, *SLOW, "--max-running", "1", "--max-waiting", "2")
    frontend = Frontend(socket)
    with running(frontend, backend):
        await asyncio.to_thread(frontend.wait_ready)
        async with client() as http:
            first = asyncio.create_task(read_stream(http, frontend.url, body([1], 300)))
            await asyncio.to_thread(wait_until, lambda: (frontend.ready() or {}).get("running", 0) == 1, 60.0)
            queued = [asyncio.create_task(read_stream(http, frontend.url, body([2, number], 5))) for number in range(2)]
            await asyncio.to_thread(wait_until, lambda: (frontend.ready() or {}).get("waiting", 0) == 2, 60.0)
            refused = await http.post(f"{frontend.url}/v1/completions", json=body([3], 5))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["message"]
            queued[0].cancel()
            await asyncio.to_thread(wait_until, lambda: (frontend.ready() or {}).get("waiting", 9) == 1, 60.0)
            first.cancel()
            assert await queued[1]
        await asyncio.to_thread(frontend.wait_idle)


def one_line_failure(argv: tuple[str, ...]) -> str:
    """Standard error of a command that must fail with one line and a nonzero exit status."""
    module, *arguments = argv
    result = subprocess.run(
        module_argv(module, arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert result.returncode not in (0, -signal.SIGSEGV)
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_command_that_cannot_start_says_so_in_one_line(pair: Pair, tmp_path: Path) -> None:
    port = pair.frontends[0].url.rsplit(":", 1)[1]
    missing = str(tmp_path / "missing")

    def at(name: str) -> tuple[str, str]:
        return "--socket", str(tmp_path / name / "backend.sock")

    fake = ("--forward-pass", "fake")
    expected = {
        ("penstock.backend.main", *fake, "--socket", str(pair.socket)): str(pair.socket),
        ("penstock.frontend.main", "--port", port, "--socket", str(pair.socket)): port,
        ("penstock.backend.main", *at("a"), "--model", missing): missing,
        ("penstock.backend.main", *at("b"), *fake, "--kv-budget", "10B"): "--kv-budget",
        ("penstock.backend.main", *at("c"), *fake, "--kv-budget", "1KB", "--max-context", "4096"): "--max-context",
        ("penstock.backend.main", *at("d"), "--forward-pass", "nothing:Here"): "nothing:Here",
        ("penstock.backend.main", *at("e"), *fake, "--gpu", "first"): "--gpu",
    }
    with ThreadPoolExecutor(len(expected)) as pool:
        messages = dict(zip(expected, pool.map(one_line_failure, expected), strict=True))
    assert {argv: named for argv, named in expected.items() if named not in messages[argv]} == {}, messages


def test_frontend_imports_no_heavy_packages() -> None:
    """A worker imports neither torch nor numpy."""
    code = "import penstock.frontend.worker, sys; "
    code += "print(sorted({'torch', 'numpy', 'cupy', 'transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [*module_argv("x")[:2], "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["DyingFakePass", "FailingFakePass"])
async def test_backend_that_cannot_serve_any_more_exits_with_status_1(name: str, tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, "--forward-pass", f"tests.passes:{name}")
    frontend = Frontend(socket)
    with running(frontend, backend):
        await asyncio.to_thread(frontend.wait_ready)
        async with client() as http:
            for number in range(20):
                if backend.process.poll() is not None:
                    break
                request = http.post(f"{frontend.url}/v1/completions", json=body([number], 4))
                asking = asyncio.create_task(request)
                ended = asyncio.create_task(asyncio.to_thread(backend.process.wait))
                await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
                asking.cancel()
        assert await asyncio.to_thread(backend.status) == 1
        assert "planted" in backend.output


def test_pass_that_cannot_be_closed_changes_the_exit_status(tmp_path: Path) -> None:
    backend = start_backend(tmp_path / "private" / "b.sock", "--forward-pass", "tests.passes:UnclosableFakePass")
    with running(backend):
        assert backend.terminate() == 1
        assert "planted" in backend.output
