from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the kept files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "quantized"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_checkpoint("llama-bias", tmp_path / "model", dtype=torch.bfloat16)
