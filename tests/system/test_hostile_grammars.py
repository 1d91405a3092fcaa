"""Grammars that try to take the server down, against the real processes."""

from __future__ import annotations

import os
import re
import signal
import string
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.system.completions import PACED
from tests.system.processes import Command, Frontend, descendants, running, start_backend, wait_until

KEYS = ("--api-key", "hostile", "--api-key", "other")
LIMIT_REACHED = re.compile(r"takes (longer than the limit of 10 s|more memory than the limit of 256 MiB)")
"""A fast CPU fills 256 MiB in less than 3 s; a busy one must come as far as is_compiling looks for."""


def hostile_schema(letters: str) -> dict[str, Any]:
    """693 bytes; its compilation takes twice the time with each pattern."""
    return {"type": "string", "allOf": [{"pattern": f".*{letter}.*"} for letter in letters]}


def ask(frontend: Frontend, key: str, grammar: dict[str, Any], max_tokens: int = 8) -> httpx.Response:
    return httpx.post(
        f"{frontend.url}/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"prompt": "hello", "max_tokens": max_tokens, "structured_outputs": grammar},
        timeout=60.0,
        verify=False,  # noqa: S501
    )


def compilers_of(backend: Command) -> list[int]:
    found = []
    for pid in descendants(backend.process.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if "compile_child" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) / 1024


def is_compiling(backend: Command) -> bool:
    """True while a child works on a hostile grammar, which goes on to 256 MiB. A child that waits has 30 MiB."""
    return any(resident_mib(pid) > 60 for pid in compilers_of(backend))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_hostile_grammar_costs_nobody_but_its_own_request(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, *PACED, "--grammar-timeout-s", "10")
    frontend = Frontend(socket, *KEYS)
    with running(frontend, backend), ThreadPoolExecutor(2) as client:
        frontend.wait_ready()
        assert ask(frontend, "other", {"regex": "[a-f]{3}"}).status_code == 200
        before_mib = resident_mib(backend.process.pid)
        refused = client.submit(ask, frontend, "hostile", {"json": hostile_schema(string.ascii_letters[:30])})
        wait_until(lambda: is_compiling(backend), 30.0)
        num_beside = 0
        while not refused.done():
            assert ask(frontend, "other", {"regex": f"[a-f]{{{num_beside + 4}}}"}, max_tokens=1).status_code == 200
            num_beside += not refused.done()
        assert num_beside > 0
        error = refused.result().json()["error"]
        assert refused.result().status_code == 400
        assert (error["param"], error["type"]) == ("structured_outputs.json", "invalid_request_error")
        assert LIMIT_REACHED.search(error["message"]), error["message"]
        assert resident_mib(backend.process.pid) - before_mib < 60

        for pid in compilers_of(backend):
            os.kill(pid, signal.SIGKILL)
        assert ask(frontend, "other", {"regex": "[a-e]{5}"}).status_code == 200

        client.submit(ask, frontend, "hostile", {"json": hostile_schema(string.ascii_letters[1:31])})
        wait_until(lambda: is_compiling(backend), 30.0)
        children = compilers_of(backend)
        assert backend.terminate() == 0
        assert all(map(is_gone, children))
        assert "Traceback" not in backend.output

        second = start_backend(socket, *PACED, "--grammar-timeout-s", "60")
        with running(frontend, second):
            frontend.wait_ready()
            client.submit(ask, frontend, "hostile", {"json": hostile_schema(string.ascii_letters[2:32])})
            wait_until(lambda: is_compiling(second), 30.0)
            children = compilers_of(second)
            os.kill(second.process.pid, signal.SIGKILL)
            wait_until(lambda: all(map(is_gone, children)), 10.0)
            frontend.kill()  # the client still waits, and a drain would, too
