"""Servers for the tests of tools."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from penstock.process.children import module_argv
from penstock.tools.free_port import free_port
from tests.serve.serve_process import Lines, Serve, Start


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, since sockets may be below it: their paths are limited to 107 bytes."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Serve] = []

    def start(*arguments: str, port: int | None = None, environment: Mapping[str, str] | None = None) -> Serve:
        if port is None:
            port = free_port()
        forward_pass = () if "--forward-pass" in arguments else ("--forward-pass", "fake")
        argv = ["serve", *forward_pass, "--port", str(port), *arguments]
        process = subprocess.Popen(
            module_argv("penstock.main", argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), **(environment or {})},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        serve = Serve(process, port, Lines(process.stdout), Lines(process.stderr))
        started.append(serve)
        return serve

    yield start
    for serve in started:
        serve.process.kill()
        serve.process.wait()
        for lines in (serve.output, serve.errors):
            lines.join()
        for pipe in (serve.process.stdout, serve.process.stderr):
            assert pipe is not None
            pipe.close()
