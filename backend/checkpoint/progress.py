"""Progress of loading weights: a bar on a terminal, or a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from penstock.shm.process.options import format_size

logger = logging.getLogger("penstock.backend")

LOG_INTERVAL_S = 5.0


class Progress(Protocol):
    """Counts bytes up to a total, until it is closed."""

    def advance(self, num_bytes: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """The work in progress, in the words of the bar and of the log."""

    running: str
    done: str


LOADING = Work("Loading weights", "Loaded")


class BarProgress:
    """A rich progress bar on standard error."""

    def __init__(self, total_bytes: int, work: Work = LOADING) -> None:
        # Imported here: the import takes 50 ms, and a service without a terminal never needs it.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn(work.running),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(work.running, total=total_bytes)
        self._bar.start()

    def advance(self, num_bytes: int) -> None:
        self._bar.advance(self._task, num_bytes)

    def close(self) -> None:
        self._bar.stop()


class LogProgress:
    """A log line every LOG_INTERVAL_S and one at the end."""

    def __init__(self, total_bytes: int, work: Work = LOADING) -> None:
        self._work = work
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._started_at = self._logged_at = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            done, total = format_size(self._done_bytes), format_size(self._total_bytes)
            logger.info("%s: %s of %s", self._work.running, done, total)

    def close(self) -> None:
        elapsed_s = time.monotonic() - self._started_at
        logger.info("%s %s of weights in %.1f s", self._work.done, format_size(self._done_bytes), elapsed_s)


def make_progress(total_bytes: int, work: Work = LOADING) -> Progress:
    """A bar if standard error is a terminal, else log lines."""
    return BarProgress(total_bytes, work) if sys.stderr.isatty() else LogProgress(total_bytes, work)
