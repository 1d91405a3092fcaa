"""Progress of long work at the start: a bar on a terminal, or a log line every few seconds.

It imports only the standard library until a bar or a number of bytes is shown: `penstock gpu-check` has nothing else.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger("penstock.backend")

LOG_INTERVAL_S = 5.0
_SHOWN_FROM_BYTES = 1_000_000
_WRITTEN_BYTES = "huggingface_hub.snapshot_download"


class Progress(Protocol):
    """Counts up to a total, until it is closed."""

    def advance(self, count: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """The name of the work in progress, for the bar and for the log."""

    running: str
    done: str
    things: str = "weights"
    counts_bytes: bool = True

    def amount(self, count: int) -> str:
        if not self.counts_bytes:
            return str(count)
        from penstock.process.options import format_size

        return format_size(count)


LOADING = Work("Loading weights", "Loaded")
GPU_KERNELS = Work("Compiling GPU kernels", "Compiled, or loaded from the cache,", "GPU kernels", counts_bytes=False)
GRAPHS = Work("Capturing CUDA graphs", "Captured", "CUDA graphs", counts_bytes=False)
MIXED_GRAPHS = Work(
    "Capturing CUDA graphs of mixed steps", "Captured", "CUDA graphs of mixed steps", counts_bytes=False
)


class BarProgress:
    """A rich progress bar on standard error."""

    def __init__(self, total: int, work: Work = LOADING) -> None:
        # Imported here: the import takes 50 ms, and a service without a terminal never needs it.
        from rich import progress
        from rich.console import Console

        columns: tuple[progress.ProgressColumn, ...] = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
        if work.counts_bytes:
            columns = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        self._bar = progress.Progress(
            progress.TextColumn(work.running), progress.BarColumn(), *columns, console=Console(stderr=True)
        )
        self._task = self._bar.add_task(work.running, total=total)
        self._bar.start()

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def close(self) -> None:
        self._bar.stop()


class LogProgress:
    """A log line every LOG_INTERVAL_S and one at the end."""

    def __init__(self, total: int, work: Work = LOADING) -> None:
        self._work = work
        self._total = total
        self._done = 0
        self._started_at = self._logged_at = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            amount = self._work.amount
            logger.info("%s: %s of %s", self._work.running, amount(self._done), amount(self._total))

    def close(self) -> None:
        elapsed_s, work = time.monotonic() - self._started_at, self._work
        of = "of " if work.counts_bytes else ""
        logger.info("%s %s %s%s in %.1f s", work.done, work.amount(self._done), of, work.things, elapsed_s)


def make_progress(total: int, work: Work = LOADING) -> Progress:
    """A bar if standard error is a terminal, else log lines."""
    return BarProgress(total, work) if _has_bars() else LogProgress(total, work)


_waiting_bar = threading.Lock()


@contextmanager
def waiting_bar(text: str) -> Iterator[None]:
    """Show a moving bar while the body runs, for work without measurable progress; nothing without a terminal.

    Several threads may wait at once; the first one has the bar.
    """
    if not _has_bars() or not _waiting_bar.acquire(blocking=False):
        yield
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn(text), progress.BarColumn(), progress.TimeElapsedColumn())
    try:
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            bar.add_task(text, total=None)
            yield
    finally:
        _waiting_bar.release()


def logged_downloads(model: str) -> type[Any]:
    """Return a class for huggingface_hub's bars that logs a download: a line every LOG_INTERVAL_S, and a last one."""
    from huggingface_hub.utils.tqdm import tqdm

    from penstock.process.options import format_size

    class LoggedBar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            # One of the hub's bars counts the bytes of all files as they are written.
            shown = {"disable": name != _WRITTEN_BYTES, "file": io.StringIO(), "mininterval": LOG_INTERVAL_S}
            super().__init__(*args, name=name, **kwargs | shown)  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            if self.n and self.total >= _SHOWN_FROM_BYTES:
                logger.info("Downloading %s: %s of %s", model, format_size(self.n), format_size(self.total))

    return LoggedBar


def _has_bars() -> bool:
    can_redraw = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
    return can_redraw and importlib.util.find_spec("rich") is not None
