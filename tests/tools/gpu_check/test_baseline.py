"""Baselines: what is compared, which direction is worse, what is refused, and what the report shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from penstock.tools.gpu_check import runner
from penstock.tools.gpu_check.__main__ import main
from penstock.tools.gpu_check.reporting import baseline
from penstock.tools.gpu_check.reporting.baseline import Baseline, BaselineFigure, BaselineRefused
from penstock.tools.gpu_check.reporting.report import write_report
from penstock.tools.gpu_check.reporting.results import Finding, SectionOutcome
from penstock.tools.gpu_check.runner import SECTIONS, Run, Section, choose_sections, run_all

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

H200 = "NVIDIA H200"


def measured(device: str = H200, sizes: str = "32/8 heads", **figures: tuple[float, str]) -> Baseline:
    named = {name.replace("__", "."): BaselineFigure(*figure) for name, figure in figures.items()}
    return Baseline(device, "abc", {"sizes.kernels": sizes}, named)


@pytest.mark.parametrize(
    ("unit", "before", "now", "verdict"),
    [
        ("tok/s", 100.0, 93.1, "warn"),
        ("tok/s", 100.0, 92.9, "fail"),
        ("tok/s", 100.0, 97.1, "ok"),
        ("tok/s", 100.0, 200.0, "ok"),
        ("TB/s", 3.6, 3.4, "warn"),
        ("TFLOP/s", 300.0, 250.0, "fail"),
        ("GB/s", 50.0, 40.0, "fail"),
        ("us", 100.0, 102.9, "ok"),
        ("us", 100.0, 103.1, "warn"),
        ("us", 100.0, 107.1, "fail"),
        ("ms", 10.0, 5.0, "ok"),
        ("ms", 10.0, 20.0, "fail"),
    ],
)
def test_unit_decides_which_direction_is_worse(unit: str, before: float, now: float, verdict: str) -> None:
    (each,) = baseline.compare(measured(a=(before, unit)), measured(a=(now, unit)))
    assert each.verdict == verdict


def test_figures_on_one_side_only_are_listed_and_fail_nothing() -> None:
    before, now = measured(a=(1, "us"), b=(1, "us"), d=(1, "us")), measured(a=(1, "us"), c=(1, "us"), d=(1, "ms"))
    compared = baseline.compare(before, now)
    findings = {finding.name: finding for finding in baseline.make_findings(before, now, compared)}
    assert [each.name for each in compared] == ["a"]
    assert findings["baseline.only_before"].value == "b, d"
    assert findings["baseline.only_now"].value == "c, d"
    assert all(finding.passed is None for finding in findings.values())


def test_baseline_keeps_only_our_own_rates_and_times() -> None:
    findings = [
        Finding("attention.decode.64x1k", 3.5, "TB/s"),
        Finding("peers.ours", 9000.0, "tok/s"),
        Finding("peer.cudnn.prefill.4k", 600.0, "TFLOP/s"),
        Finding("peers.transformers_sdpa", 900.0, "tok/s"),
        Finding("compile.load.wall", 9.0, "s"),
        Finding("engine.gpu_idle", 1.0, "%"),
        Finding("sampling.256x128k.plain", None, "us"),
        Finding("gpu.name", H200),
        Finding("link.to_host", 0.0, "GB/s"),
        Finding("sizes.kernels", "32/8 heads"),
    ]
    kept = baseline.make_baseline([SectionOutcome("kernels", "done", 1.0, findings)], {"gpu": H200, "commit": "abc"})
    assert kept == measured(attention__decode__64x1k=(3.5, "TB/s"), peers__ours=(9000.0, "tok/s"))


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (measured("NVIDIA H100", a=(1, "us")), "it is from NVIDIA H100, and this machine has NVIDIA H200"),
        (
            measured(sizes="16/8 heads", a=(1, "us")),
            "its sizes.kernels is '16/8 heads', and this run's is '32/8 heads'",
        ),
    ],
)
def test_baseline_of_another_device_or_other_sizes_is_refused_with_the_reason(before: Baseline, message: str) -> None:
    with pytest.raises(BaselineRefused, match=message):
        baseline.compare(before, measured(a=(1, "us")))


def test_saved_baseline_is_read_back_unchanged(tmp_path: Path) -> None:
    path, figures = tmp_path / "gpu" / "baseline.json", measured(a__b=(1.25, "us"), c=(3.0, "tok/s"))
    baseline.save_baseline(path, figures)
    assert baseline.load_baseline(path) == figures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a baseline"),
        ("[]", "is not a baseline"),
        ('{"device": "x", "commit": "", "sizes": {}}', "KeyError: 'figures'"),
        ('{"device": "x", "commit": "", "sizes": {}, "figures": {"a": 3}}', "is not a baseline"),
        ('{"device": "x", "commit": "", "sizes": {}, "figures": {"a": [0, "us"]}}', "a is 0 us, which cannot"),
        ('{"device": "x", "commit": "", "sizes": {}, "figures": {"a": [3, "%"]}}', "a is 3 %, which cannot"),
    ],
)
def test_invalid_baseline_file_is_refused_before_anything_runs(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["--baseline", str(path), "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err


def test_run_without_a_device_or_figures_saves_no_baseline(tmp_path: Path) -> None:
    for figures, message in ((measured("", a=(1, "us")), "is unknown"), (measured(), "measured no figure")):
        with pytest.raises(BaselineRefused, match=message):
            baseline.save_baseline(tmp_path / "x.json", figures)


# ---- In a run ----


def run_with(monkeypatch: pytest.MonkeyPatch, out: Path, us: float, passed: bool = True, **fields: Any) -> int:
    """Run one section, which finds one figure and one check."""
    findings = [Finding("a.b", us, "us"), Finding("sizes.x", "1"), Finding("gate", None, "", passed)]

    def child(section: Section, *_: object) -> SectionOutcome:
        return SectionOutcome(section.name, "done", 0.0, findings)

    monkeypatch.setattr(runner, "_run_child", child)
    monkeypatch.setattr(runner, "describe_environment", lambda commit: {"gpu": H200, "commit": commit})
    out.mkdir(exist_ok=True)
    return run_all(Run(out, 100.0, choose_sections(SECTIONS, frozenset({"kernels"}), None), commit="abc", **fields))


def test_run_slower_than_its_baseline_fails_and_names_the_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    assert run_with(monkeypatch, tmp_path / "a", 100.0, save_to=before) == 0
    for us, status in ((104.0, 0), (120.0, 1)):
        assert run_with(monkeypatch, tmp_path / "b", us, before=baseline.load_baseline(before)) == status
    assert "FAILED baseline: baseline.a.b 20.0 % worse than 100" in capsys.readouterr().out
    report = (tmp_path / "b" / "report.md").read_text()
    assert "| a.b | us | 100 | 120 | 20.0 % | fail |" in report
    (row,) = json.loads((tmp_path / "b" / "report.json").read_text())["compared"]
    assert row["verdict"] == "fail"


def test_slower_figures_become_a_baseline_but_not_after_failed_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    assert run_with(monkeypatch, tmp_path / "a", 100.0, passed=False, save_to=path) == 1
    assert "the baseline was not saved: these sections failed: kernels" in capsys.readouterr().out
    assert not path.exists()
    run_with(monkeypatch, tmp_path / "a", 200.0, before=measured(a__b=(100.0, "us")), save_to=path)
    assert baseline.load_baseline(path).figures["a.b"] == BaselineFigure(200.0, "us")


def test_baseline_of_other_sizes_fails_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = Baseline(H200, "abc", {"sizes.x": "2"}, {"a.b": BaselineFigure(100.0, "us")})
    assert run_with(monkeypatch, tmp_path / "a", 100.0, before=before) == 1
    assert "refused: its sizes.x is '2', and this run's is '1'" in (tmp_path / "a" / "report.md").read_text()


def test_committed_baseline_of_another_gpu_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.tools.gpu_check import __main__ as command

    runs: list[Run] = []
    monkeypatch.setattr(command, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(command, "run_all", lambda run: runs.append(run) or 0)
    arguments = ["--out", str(tmp_path / "out")]
    assert command.main(arguments) == 0
    baseline.save_baseline(tmp_path / "baseline.json", measured("NVIDIA H100", a=(1, "us")))
    monkeypatch.setattr(command, "describe_environment", lambda: {"gpu": H200})
    assert command.main(arguments) == 0
    assert "baseline.json: it is from NVIDIA H100, and this machine has NVIDIA H200" in capsys.readouterr().out
    monkeypatch.setattr(command, "describe_environment", lambda: {"gpu": "NVIDIA H100"})
    assert command.main(arguments) == 0
    assert [run.before is not None for run in runs] == [False, False, True]
    with pytest.raises(SystemExit):
        command.main([*arguments, "--baseline", str(tmp_path / "absent.json")])


def test_report_stays_short_when_everything_fails(tmp_path: Path) -> None:
    """Thousands of failed checks, and every figure worse."""
    names = [f"family.case{number}" for number in range(900)]
    outcomes = [
        SectionOutcome(section.name, "done", 1.0, [Finding(name, 1.0, "us", False, "wrong") for name in names])
        for section in SECTIONS
    ]
    before, now = (measured(**dict.fromkeys(names, (us, "us"))) for us in (1.0, 2.0))
    write_report(tmp_path, outcomes, {"gpu": H200}, baseline.compare(before, now))
    assert len((tmp_path / "report.md").read_text().splitlines()) < 300
