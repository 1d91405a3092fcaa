"""Fixtures of gpu-check's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.tools.gpu.devices import device_context
from tests.tools.gpu.device_context import Record, make_device_context

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.tools.gpu.devices.device_context import DeviceContext


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> DeviceContext:
    """An emulated device, which items open too."""
    made = make_device_context()
    monkeypatch.setattr(device_context, "open_device_context", lambda: made)
    return made
