from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.frontend.pictures.workshop import PictureWorkshop


@pytest.fixture(scope="session")
def workshop() -> Iterator[PictureWorkshop]:
    """One for all tests: its child takes a second to start."""
    workshop = PictureWorkshop()
    yield workshop
    workshop.close()
