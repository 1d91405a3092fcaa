"""The summary of kernels and worlds at the end of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from tests.tallies import COMPILED, SIMULATED, Tallies

REPOSITORY = Path(__file__).parents[1]
ELEMENTWISE = "tests/backend/passes/cuda/ops/test_elementwise.py"
COMPILES = "tests/backend/passes/cuda/kernels/test_compile.py::test_a_kernel_compiles_without_spills_and_fits"


SMALL_RUN = """
import pytest
from tests import tallies

def pytest_configure(config):
    config.pluginmanager.register(tallies.Tallies())
"""
SMALL_TESTS = f"""
import pytest
from tests.tallies import note_launch

@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiles(arch, record_property):
    record_property({COMPILED!r}, [(arch, "step"), (arch, "copies")])

@pytest.mark.parametrize("kernel", ["step", "copies", "step"])
def test_emulates(kernel):
    note_launch("check", kernel)
    note_launch("check", kernel)
    note_launch("fast", kernel)

def test_fails():
    note_launch("fast", "step")
    raise AssertionError
"""


def run_pytest(*arguments: str | Path) -> list[str]:
    """The lines of its output."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.splitlines()


def test_run_reports_the_kernels_that_were_compiled_and_emulated(tmp_path: Path) -> None:
    tests = (
        f"{ELEMENTWISE}::test_the_widest_norm_fits_a_block",
        f"{ELEMENTWISE}::test_rows_are_gathered_and_padding_is_not_changed",
        f"{ELEMENTWISE}::test_rows_of_odd_bytes_are_refused",
        f"{COMPILES}[sm_80-step-]",
        f"{COMPILES}[sm_90a-copies-]",
    )
    lines = run_pytest("-o", f"cache_dir={tmp_path}", *tests)
    assert "compiled, now or before: 4 cases, 4 kernels for sm_80, sm_90a" in lines
    assert 'emulated: 9 cases, 2 kernels; launches: 6 in the mode "check", 3 in the mode "fast"' in lines


def test_workers_report_what_their_tests_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conftest.py").write_text(SMALL_RUN)
    (tmp_path / "test_small.py").write_text(SMALL_TESTS)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # some installed plugins take seconds to import
    lines = run_pytest(
        "-p", "xdist", "-n", "2", "-c", "/dev/null", "--rootdir", tmp_path, "-p", "no:cacheprovider", tmp_path
    )
    assert "compiled, now or before: 4 cases, 2 kernels for sm_80, sm_90" in lines
    assert 'emulated: 3 cases, 2 kernels; launches: 6 in the mode "check", 3 in the mode "fast"' in lines


def test_simulated_worlds_are_reported_without_those_of_failed_tests() -> None:
    tallies, terminal = Tallies(), Mock()
    for is_passed, num_seeds in ((True, 2000), (False, 7)):
        properties = [(SIMULATED, {"seeds": num_seeds, "joined": 3, "cancel in decode": 1200})]
        tallies.pytest_runtest_logreport(Mock(when="call", passed=is_passed, user_properties=properties))
    tallies.pytest_terminal_summary(terminal)
    assert terminal.write_line.call_args_list == [call("2,000 seeds: 1,200 cancel in decode, 3 joined")]
