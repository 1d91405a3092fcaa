"""A report's choices become the defaults of its GPU model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backend.passes.decoder.cuda.device.kernel_choices import CONSTANTS, KernelChoices, find_choices
from penstock.tools.gpu_check.__main__ import main
from penstock.tools.gpu_check.reporting.report import write_report
from penstock.tools.gpu_check.reporting.results import Finding, SectionOutcome

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = {"gpu": "NVIDIA H200", "commit": "abc"}
FINDINGS = [
    Finding("variant.chunk_tokens", 512, "", None, "128: 7.0 % slower than the best"),
    Finding("variant.chunk_tokens.512.attention.decode.1x1k", 9.5, "us"),
    Finding("variant.step_tokens", 4096),
]


@pytest.fixture
def adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that adopted choices are copied to."""
    directory = tmp_path / "choices"
    monkeypatch.setattr("penstock.tools.gpu_check.__main__.DIRECTORY", directory)
    return directory


def test_a_reports_choices_are_adopted_for_its_gpu(
    tmp_path: Path, adopted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path, [SectionOutcome("variants", "running", 1.0, FINDINGS)], ENVIRONMENT)
    assert main(["--adopt", str(tmp_path)]) == 0
    assert "nvidia-h200.toml: page_size_tokens 32, step_tokens 4096, ring_tiles 8" in capsys.readouterr().out
    found, source = find_choices("NVIDIA H200", (9, 0), adopted)
    assert (found, source) == (KernelChoices(chunk_tokens=512, step_tokens=4096), "adopted for nvidia-h200")
    text = (adopted / "nvidia-h200.toml").read_text()
    assert text.startswith("# Chosen by penstock gpu-check on NVIDIA H200, commit abc.\n")
    assert find_choices("NVIDIA L40S", (8, 9), adopted)[0] == CONSTANTS


def test_a_report_that_cannot_be_adopted_is_refused_with_the_reason(
    tmp_path: Path, adopted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal() -> str:
        with pytest.raises(SystemExit):
            main(["--adopt", str(tmp_path)])
        return capsys.readouterr().err

    write_report(tmp_path, [], ENVIRONMENT)
    assert "choices.toml is not there: the sections variants and end-to-end write it" in refusal()
    write_report(tmp_path, [SectionOutcome("variants", "done", 1.0, FINDINGS)], {"gpu": ""})
    assert "does not name the GPU: nvidia-smi was missing or failed there" in refusal()
    (tmp_path / "report.json").write_text("{")
    assert "report.json does not name the GPU" in refusal()
    (tmp_path / "choices.toml").write_text("chunk_tokens = 1")
    assert "chunk_tokens is 1; it must be one of 128, 256, 512" in refusal()
    assert not adopted.exists()
