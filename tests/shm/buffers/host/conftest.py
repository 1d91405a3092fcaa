"""A backend with shared buffers on the host, and one client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shm.buffers.buffer_backend import TurnedBackend, TurnedClient
from tests.shm.buffers.host.harness import ON_HOST


@pytest.fixture
def backend(socket_path: Path) -> Iterator[TurnedBackend]:
    backend = TurnedBackend(socket_path)
    yield backend
    backend.until(lambda: not backend.link.balance())
    backend.close()


@pytest.fixture
def client(backend: TurnedBackend) -> Iterator[TurnedClient]:
    with backend.client(ON_HOST) as client:
        yield client
