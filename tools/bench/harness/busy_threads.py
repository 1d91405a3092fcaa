"""Threads of foreign processes that spin beside a measurement."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from penstock.process.children import stop_with_parent

_SPIN = "print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def busy_threads(count: int) -> Iterator[list[int]]:
    """Keep this many threads busy while the context lasts. Yield the ids of their processes, one for each thread.

    They have our priority. They spin in plain arithmetic, so they take time of the CPUs and hardly any memory traffic.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_busy_process()) for _ in range(count)]


@contextlib.contextmanager
def _busy_process() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _SPIN],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=stop_with_parent,
    )
    with process:
        try:
            if process.stdout is not None:
                process.stdout.readline()  # it spins from here on
            yield process.pid
        finally:
            process.kill()
