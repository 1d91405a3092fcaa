"""Subcommands and options of `penstock bench`."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pytest

from penstock.main import app
from penstock.process.options import to_argv
from penstock.tools.bench.components import quantization
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness import run
from tests.tools.bench.conftest import FAKE, BenchCommand

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.serve.options import ServeOptions

MEASUREMENTS = (
    "load",
    "compare",
    "frontend-cost",
    "interference",
    "fairness",
    "failover",
    "embeddings",
    "mask-cost",
    "quantization",
)
NOBODY = "http://127.0.0.1:1"


def shown_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exited:
        app(["bench", *arguments, "--help"])
    assert exited.value.code == 0
    return capsys.readouterr().out


def failure_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command writes before it exits with status 1, or 2 for a command that is badly written."""
    with pytest.raises(SystemExit) as exited:
        app(["bench", *arguments])
    assert exited.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_help_lists_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(capsys)
    for name in MEASUREMENTS:
        assert f" {name} " in shown
    assert "--rounds" not in shown


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_has_a_help_page_with_its_own_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(capsys, name)
    assert f"Usage: penstock bench {name}" in shown
    assert "--json" in shown
    without_server = ("mask-cost", "quantization")
    assert ("--kv-budget" in shown) is (name not in without_server)
    assert ("--url" in shown) is (name == "load")
    for unknown in ("--port", "--uds", "--dry-run", "--empty-", "[default: ()]"):
        assert unknown not in shown


def test_model_reaches_the_server_that_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def refuse(options: ServeOptions) -> NoReturn:
        started.extend(to_argv(options))
        raise BenchError("no server is started")

    monkeypatch.setattr(run, "bench_server", refuse)
    assert failure_of(capsys, "fairness", "--model", "some/model").endswith("no server is started")
    assert started[started.index("--model") + 1] == "some/model"
    assert "--models" not in started


def test_help_shows_sizes_and_counts_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(capsys, "load")
    for text in ("--kv-budget SIZE|auto", "--max-body SIZE", "--concurrency COUNTS", "1,4,16,32]", "64MiB]"):
        assert text in shown


@pytest.mark.parametrize("arguments", [["--url", NOBODY], ["load", "--url", NOBODY]])
def test_load_runs_when_no_measurement_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no connection to 127.0.0.1:1" in failure_of(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "unknown"),
    [
        (["quantization", "--url", NOBODY], "--url"),
        (["quantization", "--rounds", "3"], "--rounds"),
        (["fairness", "--url", NOBODY], "--url"),
        (["quantization", "--workers", "2"], "--workers"),
        (["mask-cost", "--max-running", "2"], "--max-running"),
        (["frontend-cost", "--forward-pass", "fake"], "--forward-pass"),
        (["interference", "--output-tokens", "2"], "--output-tokens"),
        (["load", "--port", "1"], "--port"),
        (["--stagger-s", "1"], "--stagger-s"),
    ],
)
def test_option_of_another_measurement_is_unknown(
    arguments: list[str], unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failure_of(capsys, *arguments).startswith(f"penstock bench: Unknown option: {unknown}.")


def test_unknown_measurement_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    line = failure_of(capsys, "compair")
    assert line.startswith('penstock bench: there is no measurement "compair"; choose one of load, ')


def test_no_measurement_is_imported_before_one_is_chosen() -> None:
    code = "import sys, penstock.main; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    modules = [name for name in loaded if name.startswith("penstock.tools.bench.")]
    assert modules == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["load", "--url", "nonsense"], "address"),
        (["load", "--url", NOBODY], "no connection"),
        (["load", "--url", NOBODY, "--rounds", "0"], "--rounds"),
        (["compare"], "at least one --peer"),
        (["compare", "--peer", "x=run"], "--peer"),
        (["interference", *FAKE, "--max-running", "8"], "--max-running is 8"),
        (["interference", *FAKE, "--max-batch-tokens", "9"], "--max-batch-tokens is 9"),
        (["load", "--shape", "identical", "--url", NOBODY], "leave --url out"),
    ],
)
def test_measurement_that_cannot_run_says_why_in_one_line(
    bench: BenchCommand, arguments: list[str], reason: str
) -> None:
    run = bench(*arguments)
    assert run.status in (1, 2)
    (line,) = run.errors.strip().splitlines()
    assert reason in line


def test_environment_names_one_peer_on_each_line(bench: BenchCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PEER", f"a=run it,{NOBODY}\na=run it again,{NOBODY}")
    assert "but they are penstock, a, a" in bench("compare").errors


@pytest.mark.parametrize(("name", "reason"), [("missing/x.json", "No such file or directory"), (".", "Is a directory")])
def test_unwritable_report_ends_the_command_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    monkeypatch.setattr(quantization, "measure", partial(pytest.fail, "it was measured"))
    path = tmp_path / name
    with pytest.raises(SystemExit) as exited:
        app(["bench", "quantization", "--json", str(path)])
    assert exited.value.code == 1
    assert capsys.readouterr().err == f"penstock bench: --json {path} cannot be written: {reason}\n"
