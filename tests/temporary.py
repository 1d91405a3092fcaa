"""A temporary folder for each test run: nothing of ours may be left in it. The folders that pytest makes are elsewhere.

All processes of the run inherit it as TMPDIR. What the tests of a process share and keep until its end is in folders
that make_shared_directory makes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHARED = "shared-"
_STATE = "state"
_OURS = ("penstock-", "gpu-check-", "ps-", "tmp")
"""Beginnings of the names that programs of the project, tests and Python's tempfile choose."""


def make_shared_directory() -> Path:
    """Return a new folder that goes with the test run."""
    return Path(tempfile.mkdtemp(prefix=_SHARED))


def shared_file(name: str) -> Path:
    """Return the path of a file that all processes of the test run share; whoever needs it first makes it."""
    return Path(tempfile.gettempdir(), _SHARED + name)


class TemporaryFolder:
    """The pytest plugin of the process that starts the test run."""

    def __init__(self) -> None:
        # Short, because sockets are in it; others may enter, because some tests are about other users.
        outside = tempfile.gettempdir()
        self._path = Path(tempfile.mkdtemp(prefix="ps-"))
        self._path.chmod(0o711)
        self._left: list[str] = []
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._path)
        # Servers that tests start keep no state in the user's directories.
        os.environ["XDG_STATE_HOME"] = str(self._path / _STATE)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        names = sorted(path.name for path in self._path.iterdir())
        self._left = [name for name in names if name.startswith(_OURS)]
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.write_sep("=", "left in the temporary folder", red=True)
            terminalreporter.write_line("Tests, or programs that they ran, have not removed: " + ", ".join(self._left))

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
