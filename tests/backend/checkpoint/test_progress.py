"""Progress of long work: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import io
import logging
import re
import sys
from contextlib import closing

import pytest
from huggingface_hub.utils import enable_progress_bars

from penstock.backend.checkpoint.files import progress
from penstock.backend.checkpoint.files.progress import (
    GRAPHS,
    LOADING,
    Work,
    logged_downloads,
    make_progress,
    waiting_bar,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log, with a line for each step."""
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, "penstock.backend")
    return caplog.messages


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in a test: pytest sets standard error again after the fixtures."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    return shown


@pytest.mark.parametrize(
    ("work", "total", "expected"),
    [
        (
            LOADING,
            4096,
            ["Loading weights: 2.05 KB of 4.10 KB", "Loading weights: 4.10 KB of 4.10 KB", "Loaded 4.10 KB of weights"],
        ),
        (GRAPHS, 4, ["Capturing CUDA graphs: 2 of 4", "Capturing CUDA graphs: 4 of 4", "Captured 4 CUDA graphs"]),
    ],
)
def test_log_counts_bytes_or_things(
    work: Work, total: int, expected: list[str], caplog: pytest.LogCaptureFixture, lines: list[str]
) -> None:
    with closing(make_progress(total, work)) as made:
        made.advance(total // 2)
        made.advance(total - total // 2)
    assert [re.sub(r" in \d+\.\d s$", "", line) for line in caplog.messages] == expected


@pytest.mark.parametrize(("work", "total", "shown"), [(LOADING, 4096, "4.1/4.1 kB"), (GRAPHS, 3, "3/3")])
def test_terminal_shows_a_bar_and_no_lines(
    work: Work, total: int, shown: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = as_terminal(monkeypatch)
    with closing(make_progress(total, work)) as made:
        made.advance(total)
    assert work.running in terminal.getvalue()
    assert shown in terminal.getvalue()
    assert caplog.messages == []


def test_one_of_several_waiting_threads_has_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    with waiting_bar("first"), waiting_bar("second"):
        pass
    assert "first" in terminal.getvalue()
    assert "second" not in terminal.getvalue()
    with waiting_bar("third"):
        pass
    assert "third" in terminal.getvalue()


def test_download_is_logged_by_the_bytes_that_are_written(caplog: pytest.LogCaptureFixture, lines: list[str]) -> None:
    enable_progress_bars()  # transformers switches them off for the whole process
    bar_class = logged_downloads("owner/name")
    written = bar_class(name="huggingface_hub.snapshot_download", total=0, unit="B")
    received = bar_class(name="huggingface_hub.snapshot_download.transfer", total=0, unit="B")
    written.total = received.total = 4_096_000
    for _ in range(2):
        written.update(2_048_000)
        received.update(2_048_000)
    received.close()
    written.close()
    assert caplog.messages[0] == "Downloading owner/name: 2.05 MB of 4.10 MB"
    assert set(caplog.messages[1:]) == {"Downloading owner/name: 4.10 MB of 4.10 MB"}
