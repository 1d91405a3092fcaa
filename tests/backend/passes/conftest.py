"""Helpers for tests of passes on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def choosy_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product's bits depend on its number of rows."""

    def choosy(multiply: Any) -> Any:
        def by_rows(*operands: torch.Tensor, out: torch.Tensor, **factors: float) -> torch.Tensor:
            multiply(*operands, out=out, **factors)
            return out.mul_(1 + len(out) % 101 / 128)

        return by_rows

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, choosy(getattr(torch, name)))
