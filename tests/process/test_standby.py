"""A standby that cannot start, or ends by itself, is tried again later; the supervisor's tests use one that waits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.process.children import Standby


def test_attempts_after_a_failure_or_an_end_are_a_minute_apart() -> None:
    standby = Standby()
    started: list[subprocess.Popen[bytes]] = []

    def spawn(turn: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "pass"], pass_fds=(turn,)))
        return started[-1]

    def fail(_turn: int) -> subprocess.Popen[bytes]:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        standby.start(fail, 100.0)
    standby.start(spawn, 159.0)
    assert not started
    standby.start(spawn, 160.0)
    started[0].wait()
    for now_s in (161.0, 220.0):
        standby.start(spawn, now_s)
        assert standby.take() is None
    standby.start(spawn, 221.0)
    assert len(started) == 2
    standby.drop()
