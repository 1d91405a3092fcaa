from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only listed


@pytest.fixture(autouse=True, scope="session")
def _uvloop_has_its_own_fds() -> None:
    """Create a loop now: libuv opens two pipes with the first one and keeps them."""
    uvloop.new_event_loop().close()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A short path, because a unix socket's path has at most 107 bytes, in a directory of mode 0700."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        yield Path(directory) / "b.sock"


def _shared_names() -> set[str]:
    """Names in /dev/shm, without the semaphores of multiprocessing: tests that run at the same time create some."""
    return {name for name in os.listdir(SHARED_MEMORY) if not name.startswith("sem.mp-")}


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Every test closes all file descriptors and creates no name in /dev/shm."""
    names = _shared_names()
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert _shared_names() <= names
    assert len(os.listdir("/proc/self/fd")) <= fds
