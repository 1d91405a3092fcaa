"""The list of items, results, the report, options, and the modules that gpu-check may import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock.tools.gpu
from penstock.main import app
from penstock.tools.gpu import environment, items
from penstock.tools.gpu.__main__ import main
from penstock.tools.gpu.clocks import Sample
from penstock.tools.gpu.items import UnknownName
from penstock.tools.gpu.report import write_report
from penstock.tools.gpu.results import BEGUN, DONE, DeviceGone, Finding, ItemOutcome, read_outcomes
from penstock.tools.gpu.runner import Run, run_all
from tests.tools.gpu.device_context import Record

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
    assert {item.module for item in items.ITEMS} <= set(MODULES)
    assert refused_imports(*(name for name in MODULES if not name.endswith(("__main__", "engine_loop")))) == ""


def test_refused_import_is_detected() -> None:
    assert refused_imports("penstock.shm.messages").startswith("msgspec by penstock.shm.messages")


def test_gpu_check_parses_as_python_3_11() -> None:
    paths = list(PACKAGE.rglob("*.py"))
    assert len(paths) == len(MODULES) > 0
    for path in paths:
        ast.parse(path.read_text(), str(path), feature_version=(3, 11))


# ---- The list ----


def test_names_and_their_beginnings_come_first_and_the_others_follow() -> None:
    names = [item.name for item in items.ITEMS]
    assert len(set(names)) == len(names)
    first = [item.name for item in items.order(["sharing", "attention.prefill"], has_others=True)]
    assert first[0] == "sharing"
    assert first[1:3] == ["attention.prefill.4k", "attention.prefill.8k"]
    assert sorted(first) == sorted(names)
    assert [item.name for item in items.order(["model.llama8b"], has_others=False)] == ["model.llama8b"]
    assert [item.name for item in items.order([], has_others=False)] == names


def test_settings_are_added_to_a_name() -> None:
    (item,) = items.choose(["attention.prefill.1k+wgmma=0"])
    assert (item.name, item.settings) == ("attention.prefill.1k+wgmma=0", (("wgmma", 0),))
    for name, message in (
        ("nothing", "nothing is no name of the list; names begin with environment, ceilings,"),
        ("sharing+wgmma=0", "sharing is not measured with settings"),
        ("experts.64+speed=1", "speed is no setting"),
        ("experts.64+wgmma=2", "wgmma must be one of 0, 1"),
    ):
        with pytest.raises(UnknownName, match=message):
            items.choose([name])


def test_items_beside_each_other_take_the_time_of_the_longest() -> None:
    chosen = items.choose(["ceilings", "correctness.wgmma", "correctness.decode", "environment"])
    assert items.wall_seconds(chosen) == pytest.approx(3 * 8 + 8 + 20 + 2)


# ---- Results ----


def test_failed_attempt_is_recorded_and_the_next_one_runs(record: Record) -> None:
    def fail() -> None:
        raise ValueError("\n  the first line\nthe second")

    assert not record.results.attempt("a", fail)
    assert record.results.attempt("b", lambda: record.results.fact("b", 1.5, "us"))
    failed, fact = record.all()
    assert (failed.name, failed.passed) == ("a", False)
    assert failed.detail.startswith("ValueError: the first line (test_gpu_check.py:")
    assert fact == Finding("b", 1.5, "us")


def test_lost_device_ends_the_process(record: Record) -> None:
    record.results._device_fault = lambda: "an illegal memory access"
    with pytest.raises(DeviceGone, match="illegal"):
        record.results.attempt("a", lambda: 1 / 0)
    assert [finding.name for finding in record.all()] == ["a", "device"]


def test_cupy_synchronize_error_means_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.device_fault() is None

    def synchronize() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access\nmore")

    runtime = SimpleNamespace(deviceSynchronize=synchronize)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert environment.device_fault() == "cudaErrorIllegalAddress: an illegal memory access"


def test_attempt_without_time_is_recorded_as_skipped(tmp_path: Path) -> None:
    record = Record(tmp_path, -1)
    assert not record.results.attempt("a", lambda: 1 / 0)
    assert record.findings()["a"].detail == "not measured: no time was left"


def test_line_cut_off_by_a_kill_is_ignored(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.results.fact("a", 1)
    with (tmp_path / "findings.jsonl").open("a") as file:
        file.write('{"name": "b", "val')
    assert [finding.name for finding in record.all()] == ["a"]
    assert read_outcomes(tmp_path / "nothing.jsonl") == []


def test_report_shows_each_time_beside_the_least_that_the_ceilings_allow(tmp_path: Path) -> None:
    measured = [Finding("ceiling.read", 4.0, "TB/s"), Finding("ceiling.product", 700.0, "TFLOP/s")]
    timed = [
        Finding("attention.decode.64x8k", 700.0, "us", None, "all", 2.0e9, 1e9),
        Finding("attention.prefill.4k", 100.0, "us", None, "", 0.0, 3.5e10),
        Finding("attention.prefill.1k", None, "", None, "not measured: no time was left"),
        Finding("attention.bits", 3, "", False, "differ"),
    ]
    outcomes = [
        ItemOutcome("ceilings", DONE, 100.0, 108.0, measured),
        ItemOutcome("attention.decode", DONE, 108.0, 110.0, timed[:1]),
        ItemOutcome("attention.prefill", BEGUN, 110.0, 112.0, timed[1:]),
        ItemOutcome("sharing", "not run, too little time was left", 0.0, 0.0, []),
    ]
    write_report(tmp_path, outcomes, {"gpu": "H200"}, [Sample(109.0, 1980.0, 2619.0, 600.0, 50.0)])
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "* gpu: H200" in lines
    assert lines[lines.index("## Did not end") + 2 :][:2] == [
        "* not run, too little time was left: sharing",
        "* running: attention.prefill",
    ]
    assert lines[-6:] == [
        "## attention: 4 s, 1980 to 1980 MHz, 600 W, 50 °C",
        "",
        "* attention.bits: 3 · **FAIL** · differ",
        "* attention.decode.64x8k: 700 us · 2.86 TB/s · 1.43 TFLOP/s · 71 % of the limit, 500 us · all",
        "* attention.prefill.4k: 100 us · 350 TFLOP/s · 50 % of the limit, 50 us",
        "* attention.prefill.1k: not measured: no time was left",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["items"][1]["findings"][0]["least_us"] == 500.0
    assert report["clocks"] == [{"at_s": 9.0, "sm_mhz": 1980.0, "memory_mhz": 2619.0, "watts": 600.0, "celsius": 50.0}]


# ---- Options ----


def test_options_out_of_range_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--first", "compile,nothing"], "--first: nothing is no name"),
        (["--seconds", "5"], "--seconds is 5"),
        (["--ab", str(tmp_path)], f"--ab is {tmp_path}, which is no checkout"),
        (["--checkpoint", str(tmp_path / "part.")], "no file's name begins so"),
    ):
        with pytest.raises(SystemExit):
            main([*argv, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_run_without_time_for_any_item_fails(tmp_path: Path) -> None:
    assert run_all(Run(tmp_path, 1.0, items.choose(["environment"]))) == 1


def test_list_has_the_names_and_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--first", "ceilings,sharing"]) == 0
    assert capsys.readouterr().out.split("\n")[:3] == ["   8.0 s  ceilings", "  12.0 s  sharing", "  28.0 s in all"]


def test_every_item_has_its_run_function() -> None:
    for module in {item.module for item in (*items.ITEMS, items.CUBINS)}:
        assert callable(__import__(module, fromlist=["run"]).run)


def test_penstock_command_passes_its_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, status, message in (
        (["--help"], 0, "--compile-only"),
        (["--first", "nothing"], 2, "nothing is no name"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["gpu-check", *argv])
        assert ended.value.code == status
        assert message in "".join(capsys.readouterr())
