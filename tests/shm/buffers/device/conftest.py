"""A fake device as the backend and as its clients see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shm.buffers.buffer_backend import BLOCK, TurnedBackend
from tests.shm.buffers.fake_device import FakeDevice


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FakeDevice]:
    """The device as the backend sees it."""
    device = FakeDevice(tmp_path, free_bytes=16 * BLOCK)
    yield device
    assert (device.num_allocated, device.num_events, device.registered) == (0, 0, {})


@pytest.fixture
def clients_device(tmp_path: Path, device: FakeDevice) -> Iterator[FakeDevice]:
    """The same device as another process sees it."""
    seen = FakeDevice(tmp_path)
    yield seen
    assert (seen.num_opened, seen.num_events) == (0, 0)


@pytest.fixture
def backend(socket_path: Path, device: FakeDevice) -> Iterator[TurnedBackend]:
    backend = TurnedBackend(socket_path, device)
    yield backend
    backend.close()
