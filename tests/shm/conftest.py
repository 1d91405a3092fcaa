from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only looked at


@pytest.fixture(autouse=True, scope="session")
def _uvloop_has_its_own_fds() -> None:
    """libuv opens two pipes for the whole process with its first loop and keeps them."""
    uvloop.new_event_loop().close()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Short, for a unix socket's path has 107 bytes; in a directory of mode 0700."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        yield Path(directory) / "b.sock"


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Every test gives back all file descriptors, and never makes a name in /dev/shm."""
    names = set(os.listdir(SHARED_MEMORY))
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir(SHARED_MEMORY)) <= names
    assert len(os.listdir("/proc/self/fd")) <= fds
