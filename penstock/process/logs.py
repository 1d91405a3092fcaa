"""Logging that never blocks the event loop, for frontends and the backend.

A bounded queue passes lines to a thread that writes them to standard error. While standard error blocks, lines are
dropped and counted; the count is written when it accepts output again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

_MAX_FRAMES = 12
_MAX_REASON = 500
_MAX_CAUSES = 3


class LineHandler(logging.Handler):
    """Formats in the caller's thread, writes in its own. At most max_lines wait."""

    def __init__(self, fd: int, *, max_lines: int = 4096) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_lines)
        self.num_dropped = 0
        self._num_reported = 0
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self._line(record))
        except queue.Full:
            self.num_dropped += 1
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not stop the caller
            self.handleError(record)

    def close(self) -> None:
        """Give the waiting lines a second to be written."""
        super().close()
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(timeout=1.0)

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode("utf-8", "backslashreplace") + b"\n"

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            if (num_dropped := self.num_dropped) > self._num_reported:
                line += self._line(
                    logging.makeLogRecord(
                        {
                            "name": "penstock.log",
                            "levelno": logging.WARNING,
                            "levelname": "WARNING",
                            "msg": f"{num_dropped - self._num_reported} log lines were dropped",
                        }
                    )
                )
                self._num_reported = num_dropped
            while line:
                try:
                    line = line[os.write(self._fd, line) :]
                except OSError:
                    # Standard error is closed, so there is nowhere to report it.
                    self.num_dropped += 1
                    break


def one_line(text: object) -> str:
    """Return a text of a library, whose newlines would begin other lines of a log, as one line."""
    return " ".join(str(text).split())


class RareLine:
    """One kind of line, logged at most every 10 s. The next line says how many were left out before it."""

    _EVERY_S = 10.0

    def __init__(self, logger: logging.Logger, level: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock
        self._next_s = -math.inf
        self._num_left_out = 0

    def log(self, text: str) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_left_out += 1
            return
        left_out = f" ({self._num_left_out} more like this since the last such line)" if self._num_left_out else ""
        self._logger.log(self._level, "%s%s", one_line(text), left_out)
        self._next_s, self._num_left_out = now_s + self._EVERY_S, 0


class _LineFormatter(logging.Formatter):
    """Writes each record in one line."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Fold each exception with its traceback's last frames, outermost first, and then what it came from."""
        folded: list[str] = []
        error = ei[1]
        while error is not None and len(folded) < _MAX_CAUSES:
            shown = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
            where = " > ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in shown)
            reason = repr(one_line("".join(traceback.format_exception_only(error)))[:_MAX_REASON])[1:-1]
            folded.append(f"{where}: {reason}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return f"Traceback (most recent call last): {'; from '.join(folded)}"

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())


class _JsonFormatter(_LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": record.created, "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging(level: str, *, as_json: bool, fd: int = 2) -> LineHandler:
    """Send all logging of this process to fd, as text or as one JSON object per line. The caller closes the handler."""
    handler = LineHandler(fd)
    text = _LineFormatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    return handler


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown_log(command: str) -> Iterator[None]:
    """Print what our modules log in the block as lines of a command on standard error."""
    handler, logger = _Printer(), logging.getLogger("penstock")
    handler.setFormatter(_LineFormatter(f"{command}: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
