"""The temporary folder of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CONFTEST = """
from tests.temporary import TemporaryFolder

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TemporaryFolder())
"""
TEST = """
import subprocess, sys, tempfile
from tests.temporary import make_shared_directory

def test_makes_folders(tmp_path):
    (make_shared_directory() / "model").touch()
    with tempfile.TemporaryDirectory():
        pass
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp(prefix={prefix!r})"], check=True)
"""


@pytest.mark.parametrize(
    ("prefix", "status", "found"), [("penstock-x-", 1, "have not removed: penstock-x-"), ("cc", 0, "1 passed")]
)
def test_run_that_leaves_a_folder_fails_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, status: int, found: str
) -> None:
    outside, tests = tmp_path / "outside", tmp_path / "tests"
    for directory in (outside, tests):
        directory.mkdir()
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_it.py").write_text(TEST.replace("{prefix!r}", repr(prefix)))
    monkeypatch.setenv("TMPDIR", str(outside))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some installed plugins take seconds to import
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "1", "-c", "/dev/null", "--rootdir", str(tests)]
    result = subprocess.run([*argv, "-p", "no:cacheprovider", str(tests)], capture_output=True, text=True, check=False)
    assert (result.returncode, found in result.stdout) == (status, True), result.stdout + result.stderr
    assert [path.name.partition("-")[0] for path in outside.iterdir()] == ["pytest"]
