"""Regions of shared memory: a sealed one keeps its size, and nothing else is mapped."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from penstock.shm.memory import region


def test_sealed_region_cannot_be_resized() -> None:
    fd = region.create("t", 4096)
    region.seal(fd)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_unsealed_or_too_small_region_is_refused(tmp_path: Path) -> None:
    unsealed = region.create("t", 4096)
    with pytest.raises(region.RegionError):
        region.attach(unsealed, 4096, writable=False)
    region.seal(unsealed)
    with pytest.raises(region.RegionError):
        region.attach(unsealed, 8192, writable=False)
    region.attach(unsealed, 4096, writable=False).close()
    os.close(unsealed)
    with (tmp_path / "file").open("wb+") as file, pytest.raises(region.RegionError):
        region.attach(file.fileno(), 0, writable=False)
