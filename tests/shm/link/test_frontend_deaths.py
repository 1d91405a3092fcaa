"""Frontend processes that are killed or stopped while they stream."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.shm.link.harness import ROOT
from tests.shm.scripted_backend import Script, ScriptedBackend

FRONTEND_PROCESS = """
import asyncio, sys
from pathlib import Path
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.messages import Sampling

async def main() -> None:
    client = BackendClient(Path(sys.argv[1]))
    await client.start()
    while not client.ready:
        await asyncio.sleep(0.005)
    streams = [client.submit(GenerationRequest([n, n + 1], 30_000, Sampling())) for n in range(16)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    print("streaming", flush=True)
    await asyncio.gather(*(drain(stream) for stream in streams))

async def drain(stream) -> None:
    async for _ in stream:
        pass

asyncio.run(main())
"""


@contextmanager
def frontend_process(socket_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A frontend process with 16 running streams."""
    argv = [sys.executable, "-c", FRONTEND_PROCESS, str(socket_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "streaming\n"
            yield child
        finally:
            child.kill()


def wait_for(condition: threading.Event | object, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_killed_frontend_is_noticed_once_and_leaves_nothing(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        for round_ in range(1, 4):
            with frontend_process(socket_path) as child:
                assert len(backend.engine.running) == 16
                child.kill()
                wait_for(lambda round_=round_: len(backend.engine.deaths) == round_)
                wait_for(lambda: not backend.engine.running)
        assert len(set(backend.engine.deaths)) == 3
        assert backend.engine.link.balance() == {}


def test_stopped_frontend_blocks_no_other_and_resumes_under_a_new_epoch(socket_path: Path) -> None:
    script = Script(step_s=0.001, credit=16, stall_limit_s=0.3)
    with ScriptedBackend(socket_path, script) as backend, frontend_process(socket_path) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        with frontend_process(socket_path):
            wait_for(lambda: len(backend.engine.deaths) == 1)
            assert len(backend.engine.running) == 16
            steps = backend.engine.board.steps
            wait_for(lambda: backend.engine.board.steps > steps + 20)
            stopped.send_signal(signal.SIGCONT)
            wait_for(lambda: len(backend.engine.running) == 32)
        assert backend.engine.link.counters.stalled == 1
        assert backend.engine.link.counters.blocked_sends == 0
