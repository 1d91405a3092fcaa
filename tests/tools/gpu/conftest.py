"""Fixtures of gpu-check's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tools.gpu.device_context import Record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path)
