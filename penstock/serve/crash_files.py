"""Keeps the last seconds of a backend that has crashed, for `penstock timeline`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory
from penstock.shm.memory.ring import RingReader
from penstock.shm.recording.file import RecordingWriter
from penstock.shm.recording.last_seconds import read_last

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SECONDS = 10.0
MAX_FILES = 8
"""Files in the directory, at most. The oldest are removed."""
_PREFIX = "crash-"


class CrashFiles:
    """Writes the crash files. Used by the process that holds the ring and restarts the backend. A failed write stops
    nothing."""

    def __init__(self, ring_fd: int, directory: Path, name: str, log: Callable[[str], None]) -> None:
        """name is the backend's. The fd stays the caller's."""
        self._ring_fd = ring_fd
        self._directory = directory
        self._name = name
        self._log = log
        self._written = 0
        """Position up to which the ring is in a file."""

    def write(self) -> None:
        """Write a file, and log where, unless the backend has written nothing since the last one."""
        ring = RingReader(self._ring_fd)
        try:
            if ring.written != self._written:
                path = self._write(ring)
                self._written = ring.written
                self._log(f"the last {_SECONDS:g} s of the {self._name} are in {path}; penstock timeline shows them")
        except (OSError, UnsafeDirectory) as error:
            self._log(f"the last {_SECONDS:g} s of the {self._name} cannot be kept: {error}")
        finally:
            ring.close()

    def _write(self, ring: RingReader) -> Path:
        check_directory(self._directory, Trust.PRIVATE)
        now = time.strftime("%Y%m%dT%H%M%S")
        path = self._directory / f"{_PREFIX}{now}-{self._name.replace(' ', '-').replace('/', '-')}-{ring.written}.rec"
        with RecordingWriter(path) as file:
            file.write(read_last(ring, _SECONDS))
        for old in sorted(self._directory.glob(f"{_PREFIX}*.rec"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
        return path
