"""gpu-check --ncu, with a script that prints Nsight Compute's output."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backend.passes.decoder.ops import HeadShape
from penstock.tools.gpu_check.__main__ import main
from penstock.tools.gpu_check.kernel_speed import ncu, ncu_child
from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelSizes, kernel_cases
from tests.tools.gpu_check.device_context import make_device_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASE = "attention.decode.1x1k"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS: dict[str, tuple[str, list[str]]] = {
    "ID": ("", ["0", "1", "2"]),
    "Process ID": ("", ["77", "77", "77"]),
    "Kernel Name": ("", ["decode_attention", "decode_attention", "combine(const float *, int)"]),
    "Block Size": ("", ["(128, 1, 1)"] * 3),
    "dram__bytes.sum.per_second": ("byte/s", ["3600000000000", "3,800,000,000,000", "1000000000"]),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", ["80.5", "81.5", "2"]),
    "gpu__time_duration.sum": ("ns", ["71,000", "73,000", "2016"]),
    "launch__registers_per_thread": ("register/thread", ["128", "128", "32"]),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", ["31", "33", "n/a"]),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", ["24.5", "24.7", "9"]),
    STALLED.format("long_scoreboard"): ("inst", ["6", "6", "1"]),
    STALLED.format("long_scoreboard_not_issued"): ("inst", ["9", "9", "1"]),
    STALLED.format("not_selected"): ("inst", ["1", "1", "1"]),
    STALLED.format("wait"): ("inst", ["2", "3", "1"]),
    STALLED.format("selected"): ("inst", ["1", "1", "1"]),
}


def raw_page(columns: dict[str, tuple[str, list[str]]] = COLUMNS) -> str:
    """Output of `--page raw --csv`: names, units, and a line for each launch."""
    lines = [list(columns), [unit for unit, _ in columns.values()]]
    lines += [list(row) for row in zip(*(values for _, values in columns.values()), strict=True)]
    return "".join(",".join(json.dumps(cell) for cell in line) + "\n" for line in lines)


def fake_ncu(directory: Path, profiling: str = "pass", raw: str = "") -> None:
    """Put an ncu on PATH that runs the code `profiling` to record, and prints two pages of any recording."""
    script = f"""
import os, subprocess, sys
from pathlib import Path
argv = sys.argv[1:]
if "--import" in argv:
    assert Path(argv[argv.index("--import") + 1]).exists()
    print("==WARNING== something harmless")
    print({raw or raw_page()!r} if "raw" in argv else "  decode_attention\\n    Section: GPU Speed Of Light")
else:
    Path(os.environ["ARGV_FILE"]).write_text("\\n".join(argv))
    {profiling}
    Path(argv[argv.index("--export") + 1]).write_bytes(b"recorded")
"""
    path = directory / "ncu"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setenv("ARGV_FILE", str(tmp_path / "argv"))
    monkeypatch.setattr(ncu, "_SEARCH_PATHS", ())
    return directory


def test_metrics_of_a_case_are_in_the_report(place: Path, tmp_path: Path) -> None:
    fake_ncu(place)
    out = tmp_path / "out"
    assert main(["--ncu", CASE, "--out", str(out), "--commit", "abc"]) == 0
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv[:2] == ["--clock-control", "none"]
    assert argv[-3:] == ["-m", "penstock.tools.gpu_check.kernel_speed.ncu_child", CASE]
    (section,) = json.loads((out / "report.json").read_text())["sections"]
    found = {finding["name"].removeprefix(f"ncu.{CASE}."): finding for finding in section["findings"]}
    assert found["decode_attention.duration"]["value"] == pytest.approx(72)
    assert found["decode_attention.duration"]["detail"] == "of 2 launches"
    assert (found["decode_attention.dram"]["value"], found["decode_attention.dram"]["unit"]) == (
        pytest.approx(3.7),
        "TB/s",
    )
    assert found["decode_attention.registers"]["value"] == 128
    assert found["decode_attention.stalls"]["value"] == "long_scoreboard 60 %, wait 30 %, not_selected 10 %"
    assert found["combine.duration"]["value"] == pytest.approx(2.016)
    assert found["combine.sm_of_peak"]["detail"].startswith("not measured: ncu has no sm__throughput")
    assert sorted(path.name for path in out.iterdir()) == [
        f"ncu-{CASE}.ncu-rep", f"ncu-{CASE}.txt", "report.json", "report.md",
    ]  # fmt: skip
    assert "Section: GPU Speed Of Light" in (out / f"ncu-{CASE}.txt").read_text()


@pytest.mark.parametrize(
    ("profiling", "message"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM - no permission'); sys.exit(1)", "ERR_NVGPUCTRPERM"),
        ("print('==ERROR== The application returned an error code (1).')", "returned an error code"),
        ("print('Traceback'); print('RuntimeError: no GPU'); sys.exit(9)", "status 9: RuntimeError: no GPU"),
    ],
)
def test_failure_is_reported_in_ncus_words(
    place: Path, tmp_path: Path, profiling: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_ncu(place, profiling)
    assert main(["--ncu", CASE, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().out
    assert message in (tmp_path / "out" / "report.md").read_text()


def test_recording_without_kernels_fails(place: Path, tmp_path: Path) -> None:
    fake_ncu(place, raw="==WARNING== No kernels were profiled.\n")
    assert main(["--ncu", CASE, "--out", str(tmp_path / "out")]) == 1
    assert "ncu profiled no kernel" in (tmp_path / "out" / "report.md").read_text()


def test_unknown_case_is_refused_with_the_list_of_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--ncu", "attention", "--out", str(tmp_path)])
    message = capsys.readouterr().err
    assert "--ncu is attention, which is not a case; choose from attention.decode.64x1k, " in message
    assert "elementwise.silu_mul.8192" in message


def test_missing_ncu_is_reported_in_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not list(place.iterdir())
    assert main(["--ncu", CASE, "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Nsight Compute is not installed" in line


def test_units_of_older_versions_are_accepted() -> None:
    columns = COLUMNS | {"gpu__time_duration.sum": ("usecond", ["71", "73", "2"])}
    launches = ncu.parse_raw("==PROF== Connected to process 77\n" + raw_page(columns))["decode_attention"]
    assert ncu._first_value(launches[0], ("gpu__time_duration.sum",)) == 71
    assert ncu.parse_raw("nothing") == {}


def test_only_launches_of_the_case_are_profiled() -> None:
    context, launched = make_device_context(), []
    sizes = KernelSizes(
        HeadShape(4, 2, 64), decode=(("a", 2, 40, "bf16"),), prefill=(), elementwise_tokens=(), cold_bytes=1
    )
    launch = context.device.launcher.launch

    def note(kernel: Any, *arguments: Any) -> None:
        launched.append(kernel.entry)
        launch(kernel, *arguments)

    context.device.launcher.launch = note  # type: ignore[method-assign]
    inside: list[str] = []

    @contextmanager
    def profiling() -> Iterator[None]:
        launched.clear()
        yield
        inside.extend(launched)

    ncu_child.run_case(context, kernel_cases(sizes)[0], profiling())
    assert inside == ["decode_attention"] * 3
    assert len(ncu_child.case_names()) == len(set(ncu_child.case_names()))
    assert os.sep not in "".join(ncu_child.case_names())
