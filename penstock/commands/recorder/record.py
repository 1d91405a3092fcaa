"""Copies the records of a running backend into a file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.shm.recording.file import RecordingWriter
from penstock.shm.recording.live import read_last

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.shm.memory.ring import RingReader, Stretch

_EVERY_S = 0.1


def record(
    ring: RingReader, path: Path, seconds: float, *, with_tokens: bool, wait: Callable[[float], object] = time.sleep
) -> int:
    """Record for the given seconds, and across restarts of the backend; return the file's bytes.

    A key interrupt ends it early. Raises OSError.
    """
    with RecordingWriter(path, with_tokens=with_tokens) as file:
        # From the last key plan on, so that the rows of the first steps are known.
        stretch = read_last(ring, 0.0)
        file.write(stretch)
        until_s = time.monotonic() + seconds
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                wait(min(_EVERY_S, left_s))
                stretch = _copy_new(ring, file, stretch.end)
        except KeyboardInterrupt:
            _copy_new(ring, file, stretch.end)
        return file.num_bytes


def _copy_new(ring: RingReader, file: RecordingWriter, begin: int) -> Stretch:
    stretch = ring.read(begin)
    if stretch.records:
        file.write(stretch)
    return stretch
