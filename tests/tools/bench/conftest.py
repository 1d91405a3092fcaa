"""Runs `penstock bench` commands in the test's process."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.main import app
from penstock.serve.options import ServeOptions
from penstock.tools.bench.harness import run
from penstock.tools.bench.harness.server import BenchServer, bench_server
from penstock.tools.free_port import free_port

FAKE = ("--forward-pass", "fake")
FAKE_PEER = Path(__file__).with_name("fake_peer.py")


@dataclass(frozen=True)
class BenchOutcome:
    status: int
    output: str
    errors: str
    report: dict[str, Any]


def fake_peer(name: str, *arguments: str) -> str:
    """The value of --peer for a `fake_peer` on a free port."""
    port = free_port()
    command = shlex.join([sys.executable, "-I", str(FAKE_PEER), str(port), name, *arguments])
    return f"{name}={command},http://127.0.0.1:{port}"


BenchCommand = Callable[..., BenchOutcome]
Servers = Callable[[ServeOptions], AbstractContextManager[BenchServer]]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Servers of the benchmark; tests of a module that ask for the same options share one."""
    started: dict[ServeOptions, BenchServer] = {}
    with ExitStack() as stack:

        @contextmanager
        def server(options: ServeOptions) -> Iterator[BenchServer]:
            if options not in started:
                started[options] = stack.enter_context(bench_server(options))
            yield started[options]

        yield server


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """Some measurements end with `gc.unfreeze`, which undoes what tests/conftest.py froze."""
    yield
    gc.freeze()


@pytest.fixture
def bench(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> BenchCommand:
    """Runs `penstock bench ARGUMENTS --json FILE`."""
    monkeypatch.setattr(run, "bench_server", servers)

    def bench(*arguments: str) -> BenchOutcome:
        path = tmp_path / "report.json"
        with pytest.raises(SystemExit) as exited:
            app(["bench", *arguments, "--json", str(path)])
        assert isinstance(exited.value.code, int)
        captured = capsys.readouterr()
        report = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        return BenchOutcome(exited.value.code, captured.out, captured.err, report)

    return bench
