"""Sections in processes of their own, results, reports, goals, options, and the modules that gpu-check may import."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock.tools.gpu
from penstock.main import app
from penstock.tools.gpu import environment, runner
from penstock.tools.gpu.__main__ import main
from penstock.tools.gpu.report import write_report
from penstock.tools.gpu.results import Finding, Results, SectionOutcome, SectionOver, read_findings
from penstock.tools.gpu.runner import SECTIONS, Run, Section, choose_sections, run_all

PACKAGE = Path(penstock.tools.gpu.__file__).parent
MODULES = sorted(".".join(path.relative_to(PACKAGE.parents[2]).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))
REFUSED = """
import importlib.util, sys
ALLOWED = {"torch", "cupy", "numpy", "safetensors", "penstock"}
refused = []
class Refuse:
    def find_spec(self, name, path=None, target=None):
        # Imports by torch and numpy themselves are allowed.
        frame, importer = sys._getframe(1), ""
        while frame is not None and (importer := frame.f_globals.get("__name__", "")).startswith("importlib"):
            frame = frame.f_back
        top = name.partition(".")[0]
        ours = importer.partition(".")[0] in {"penstock", "__main__"}
        if ours and top not in ALLOWED and top not in sys.stdlib_module_names:
            refused.append(f"{name} by {importer}")
        return None
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    __import__(name)
named = "msgspec rich cyclopts pydantic zmq llguidance huggingface_hub tokenizers uvicorn transformers"
refused += sorted(set(named.split()) & set(sys.modules))
print("; ".join(refused))
"""


def refused_imports(*modules: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, *modules], capture_output=True, text=True, check=True, cwd=PACKAGE.parents[2]
    )
    return done.stdout.strip()


def test_gpu_check_imports_only_torch_cupy_numpy_safetensors_and_the_project() -> None:
    assert {section.module for section in SECTIONS} <= set(MODULES)
    assert refused_imports(*(name for name in MODULES if not name.endswith(("__main__", "engine_loop")))) == ""


def test_refused_import_is_detected() -> None:
    assert refused_imports("penstock.shm.messages").startswith("msgspec by penstock.shm.messages")


def test_gpu_check_parses_as_python_3_11() -> None:
    paths = list(PACKAGE.rglob("*.py"))
    assert len(paths) == len(MODULES) > 0
    for path in paths:
        ast.parse(path.read_text(), str(path), feature_version=(3, 11))


# ---- Results ----


def test_failed_attempt_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.jsonl", 60)

    def fail() -> None:
        raise ValueError("\n  the first line\nthe second")

    assert not results.attempt("a", fail)
    assert results.attempt("b", lambda: results.fact("b", 1.5, "us"))
    failed, fact = read_findings(tmp_path / "x.jsonl")
    assert (failed.name, failed.passed) == ("a", False)
    assert failed.detail.startswith("ValueError: the first line (test_gpu_check.py:")
    assert fact == Finding("b", 1.5, "us")
    assert results.num_failed == 1


def test_lost_device_ends_the_section(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.jsonl", 60, lambda: "an illegal memory access")
    with pytest.raises(SectionOver, match="illegal"):
        results.attempt("a", lambda: 1 / 0)
    assert [finding.name for finding in read_findings(tmp_path / "x.jsonl")] == ["a", "device"]


def test_cupy_synchronize_error_means_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.device_fault() is None

    def synchronize() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access\nmore")

    runtime = SimpleNamespace(deviceSynchronize=synchronize)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert environment.device_fault() == "cudaErrorIllegalAddress: an illegal memory access"


def test_attempt_without_enough_time_is_recorded_as_skipped(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.jsonl", 5)
    assert not results.attempt("a", lambda: 1 / 0, needs_s=10)
    (skipped,) = read_findings(tmp_path / "x.jsonl")
    assert (skipped.passed, skipped.detail) == (None, "not measured: only 5 s were left")


def test_line_cut_off_by_a_kill_is_ignored(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.jsonl", 5)
    results.fact("a", 1)
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('{"name": "b", "val')
    assert [finding.name for finding in read_findings(tmp_path / "x.jsonl")] == ["a"]
    assert read_findings(tmp_path / "nothing.jsonl") == []


# ---- The report ----


def test_related_findings_share_a_line_and_show_their_share_of_the_ceiling(tmp_path: Path) -> None:
    findings = [
        Finding("sizes.kernels", "32/8 heads"),
        Finding("memory.planned", 90.0, "GB"),
        Finding("memory", 88.0, "", True),
        Finding("attention.decode.64x8k", 3.44, "TB/s"),
        Finding("attention.decode.64x8k.time", 630.0, "us"),
        Finding("attention.decode.64x8k.q8_0", 3.01, "TB/s"),
        Finding("attention.decode.64x8k.q8_0.time", 380.0, "us"),
        Finding("attention.decode.64x8k.gate", None, "", True),
    ]
    ceilings = SectionOutcome("ceilings", "done", 1.0, [Finding("ceiling.copy", 4.3, "TB/s")])
    write_report(tmp_path, [ceilings, SectionOutcome("kernels", "done", 1.0, findings)], {})
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[-5:] == [
        "",
        "* memory: 88 · pass; planned: 90 GB",
        "* attention.decode.64x8k: 3.44 TB/s · 80 % of ceiling.copy; time: 630 us",
        "* attention.decode.64x8k.q8_0: 3.01 TB/s · 70 % of ceiling.copy; time: 380 us",
        "* attention.decode.64x8k.gate: pass",
    ]
    assert "* ceiling.copy: 4.3 TB/s" in lines


# ---- Sections in processes ----

STUB = """
import time
def run(results):
    results.fact("first", 1)
    {body}
    results.check("last", True)
"""


def run_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, budget_s: float = 60.0) -> SectionOutcome:
    """Run a stub section in the real child process."""
    (tmp_path / "stub_section.py").write_text(textwrap.dedent(STUB).format(body=body))
    (tmp_path / "sitecustomize.py").write_text(
        "from penstock.tools.gpu import runner\nrunner.SECTIONS = (runner.Section('stub', 'stub_section', 1),)\n"
    )
    root = PACKAGE.parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    section = Section("stub", "stub_section", 1)
    return runner._run_child(section, Run(tmp_path, budget_s, (section,)), budget_s, lambda _: None)


def test_section_findings_come_back_from_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_stub(tmp_path, monkeypatch, "assert results.remaining_s < 61")
    assert (outcome.outcome, [finding.name for finding in outcome.findings]) == ("done", ["first", "last"])
    assert outcome.passed


def test_section_that_dies_keeps_its_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_stub(tmp_path, monkeypatch, "import os; os.abort()")
    assert [finding.name for finding in outcome.findings] == ["first"]
    assert outcome.outcome == "failed with status -6"
    assert not outcome.passed


def test_section_that_raises_fails_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_stub(tmp_path, monkeypatch, "raise ValueError('what happened')")
    assert [finding.name for finding in outcome.findings] == ["first", "stub"]
    assert "what happened" in outcome.findings[1].detail


def test_hanging_section_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE_S", 0.0)
    outcome = run_stub(tmp_path, monkeypatch, "import threading; threading.Event().wait()", budget_s=2.5)
    assert (outcome.outcome, outcome.passed) == ("timed out", False)
    assert [finding.name for finding in outcome.findings] == ["first"]


def test_sections_share_the_remaining_time_and_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, float] = {}

    def child(section: Section, run: Run, budget_s: float, on_progress: Any) -> SectionOutcome:
        given[section.name] = budget_s
        return SectionOutcome(section.name, "done", 0.0, [Finding("x", None, "", section.name != "sharing")])

    monkeypatch.setattr(runner, "_run_child", child)
    monkeypatch.setattr(runner, "describe_environment", lambda commit: {"commit": commit})
    chosen = choose_sections(SECTIONS, ("environment", "sharing"))
    assert run_all(Run(tmp_path, 100.0, chosen, commit="abc")) == 1
    assert list(given) == ["environment", "sharing"]
    # Shares of 30 and 15; the first section used none of its time.
    assert given["environment"] == pytest.approx(61, abs=1)
    assert given["sharing"] == pytest.approx(92, abs=1)
    assert "failed: sharing" in capsys.readouterr().out
    assert "* commit: abc" in (tmp_path / "report.md").read_text()


def test_options_out_of_range_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--only", "compile,nothing"], "--only names nothing"),
        (["--budget", "5"], "--budget is 5"),
        (["--match", "("], "--match is (: "),
        (["--choices", str(tmp_path / "absent")], "absent cannot be read"),
    ):
        with pytest.raises(SystemExit):
            main([*argv, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_every_section_has_its_run_function() -> None:
    for section in SECTIONS:
        assert callable(__import__(section.module, fromlist=["run"]).run)


def test_section_that_needs_a_gpu_fails_without_one_and_says_so(tmp_path: Path) -> None:
    assert main(["--only", "ceilings", "--out", str(tmp_path), "--budget", "60"]) == 1
    assert "cuda" in (tmp_path / "report.md").read_text().lower()


def test_penstock_command_passes_its_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, status, message in (
        (["--help"], 0, "--compile-only"),
        (["--only", "nothing"], 2, "--only names nothing"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["gpu-check", *argv])
        assert ended.value.code == status
        assert message in "".join(capsys.readouterr())
