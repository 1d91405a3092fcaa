"""A sign of life in shared memory, from a process to its supervisor: no protocol, and a hung process cannot fake it."""

from __future__ import annotations

import mmap
import os
import time

_BYTES = 8


class Heartbeat:
    """One word: the CLOCK_MONOTONIC nanoseconds of the last beat. The child writes it; the supervisor only clears it
    before it starts a child. 0 is a child that starts, of which no beat is expected."""

    def __init__(self, fd: int) -> None:
        """Takes the fd over. Raises OSError and ValueError for one that is not of `create`."""
        self._mapping = mmap.mmap(fd, _BYTES)
        self._word = memoryview(self._mapping).cast("Q")
        self.fd = fd

    @classmethod
    def create(cls) -> Heartbeat:
        """In the supervisor. The fd is inherited by children that name it in pass_fds."""
        fd = os.memfd_create("penstock-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd)

    def close(self) -> None:
        self._word.release()
        self._mapping.close()
        os.close(self.fd)

    def beat(self) -> None:
        """Cheap enough for each turn of a loop."""
        self._word[0] = time.monotonic_ns()

    def clear(self) -> None:
        self._word[0] = 0

    @property
    def last_ns(self) -> int:
        return self._word[0]


class HangWatch:
    """Adds up how long a heartbeat is silent while the watching process itself runs.

    A suspended machine, or a watcher that is stopped together with what it watches, adds at most longest_step_s.
    """

    def __init__(self, heartbeat: Heartbeat, timeout_s: float, longest_step_s: float) -> None:
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._longest_step_s = longest_step_s
        self._last_ns = 0
        self._looked_s = time.monotonic()
        self.silent_s = 0.0

    def restart(self) -> None:
        """Another child starts."""
        self._heartbeat.clear()
        self.silent_s = 0.0

    def is_hung(self, now_s: float) -> bool:
        """Call every longest_step_s or more often."""
        step_s = min(now_s - self._looked_s, self._longest_step_s)
        self._looked_s = now_s
        last_ns, self._last_ns = self._last_ns, self._heartbeat.last_ns
        self.silent_s = self.silent_s + step_s if self._last_ns and self._last_ns == last_ns else 0.0
        return self.silent_s >= self._timeout_s
