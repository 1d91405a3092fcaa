"""A sign of life in shared memory, from a process to its supervisor. A hung process cannot give one."""

from __future__ import annotations

import mmap
import os
import time
from typing import Protocol

_BEAT_BYTES = 8
_MAX_WORDS_BYTES = 504
_BYTES = _BEAT_BYTES + _MAX_WORDS_BYTES


class SignOfLife(Protocol):
    """A callable that a loop calls in each turn."""

    def beat(self) -> None: ...


class Heartbeat:
    """The CLOCK_MONOTONIC nanoseconds of the last beat, and the child's explanation if it could not start.

    The child writes both. The supervisor clears them before it starts a child: at 0 the child is starting, and no beat
    is expected.
    """

    def __init__(self, fd: int) -> None:
        """Takes the fd over. Raises OSError and ValueError for an fd that did not come from `create`."""
        self._mapping = mmap.mmap(fd, _BYTES)
        self._word = memoryview(self._mapping)[:_BEAT_BYTES].cast("Q")
        self.fd = fd

    @classmethod
    def create(cls) -> Heartbeat:
        """For the supervisor. Children whose pass_fds contain the fd inherit it."""
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
        self._mapping[_BEAT_BYTES:] = bytes(_MAX_WORDS_BYTES)

    def leave_words(self, text: str) -> None:
        """Say why the child cannot start. The end of a long text is cut off."""
        self._mapping[_BEAT_BYTES:] = text.encode()[:_MAX_WORDS_BYTES].ljust(_MAX_WORDS_BYTES, b"\0")

    @property
    def last_words(self) -> str:
        """The child's explanation of why it could not start; empty if there is none."""
        return self._mapping[_BEAT_BYTES:].rstrip(b"\0").decode(errors="replace")

    @property
    def last_ns(self) -> int:
        return self._word[0]


class HangWatch:
    """Adds up how long a heartbeat is silent while the watching process itself runs.

    If the machine is suspended, or the watcher itself is stopped, that adds at most longest_step_s.
    """

    def __init__(self, heartbeat: Heartbeat, timeout_s: float, longest_step_s: float) -> None:
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._longest_step_s = longest_step_s
        self._last_ns = 0
        self._looked_s = time.monotonic()
        self.silent_s = 0.0

    def restart(self) -> None:
        """Call before a child starts."""
        self._heartbeat.clear()
        self.silent_s = 0.0

    def is_hung(self, now_s: float) -> bool:
        """Call every longest_step_s or more often."""
        step_s = min(now_s - self._looked_s, self._longest_step_s)
        self._looked_s = now_s
        last_ns, self._last_ns = self._last_ns, self._heartbeat.last_ns
        self.silent_s = self.silent_s + step_s if self._last_ns and self._last_ns == last_ns else 0.0
        return self.silent_s >= self._timeout_s
