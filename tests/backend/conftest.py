"""Fixtures that all tests of the backend share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backend.passes.cpu.weight_memory import shared

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def packs_into_memory() -> Iterator[None]:
    """Packed weights get no file in this user's cache. Tests of such files choose a directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "packed_file", lambda *_: None)
        yield
