"""The options of `penstock chaos`, and what it says when they cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.main import app
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.chaos.ledger import DoneFault, Ledger
from penstock.tools.chaos.report import Outcome, make_report, write_report

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--url", "http://127.0.0.1:1", "--behind", "both"), "leave --start and --behind out"),
        (("--url", "http://127.0.0.1:1", "--start", "--workers 2"), "leave --start and --behind out"),
        (("--url", "https://127.0.0.1:1"), "is not an address of the form http://host:port"),
        (("--url", "http://127.0.0.1:1"), "/v1/models: no connection to 127.0.0.1:1"),
        (("--url", "http://127.0.0.1:1", "--bad-models", "3"), "--bad-models needs files of its own"),
        (("--api-key", "k"), "--api-key is for --url"),
        (("--start", "--port 80"), "--start has --port"),
        (("--start", "--api-key-file keys"), "--start has --api-key-file"),
        (("--report", "missing-folder/report.md"), "missing-folder/report.md"),
        (("--minutes", "0"), "minutes"),
        (("--drop-rate", "1.5"), "drop-rate"),
        (("--start", "--no-such-option"), "no-such-option"),
    ],
)
def test_options_that_cannot_be_used_end_it_with_one_line(
    arguments: tuple[str, ...],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        app(["chaos", *arguments])
    assert exited.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_report_names_faults_and_every_imbalance(tmp_path: Path) -> None:
    outcome = Outcome(Ledger(), started_s=100.0)
    outcome.faults = [DoneFault("backend killed", 103.0, 2.0), DoneFault("backend killed", 110.0, 1.0)]
    report = make_report(["chaos", "--start", "a b"], outcome)
    assert report.is_balanced
    assert [fault.at_s for fault in report.faults] == [3.0, 10.0]
    outcome.ledger.expect("pages in use", 1, 0)
    path = tmp_path / "report.md"
    write_report(path, make_report(["chaos"], outcome))
    text = path.read_text()
    assert "| backend killed | 2 | 2.0 s |" in text
    assert "* pages in use: 1\n    * pages in use: 1 instead of 0" in text
    with pytest.raises(ChaosError, match="cannot be written"):
        write_report(tmp_path / "missing" / "report.json", report)
