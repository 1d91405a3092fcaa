"""Fixtures for tests of the link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shm.link.events import FrontendDeath
from tests.shm.link.harness import Backend


@pytest.fixture
def backend(socket_path: Path) -> Iterator[Backend]:
    backend = Backend(socket_path)
    yield backend
    backend.until_balanced()
    backend.link.ledger.check()
    births = {event.frontend for event in backend.events}
    deaths = [event.frontend for event in backend.events if isinstance(event, FrontendDeath)]
    assert sorted(births) == sorted(deaths)
    backend.close()
