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


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Every test closes all file descriptors and creates no name in /dev/shm."""
    names = set(os.listdir(SHARED_MEMORY))
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir(SHARED_MEMORY)) <= names
    assert len(os.listdir("/proc/self/fd")) <= fds
