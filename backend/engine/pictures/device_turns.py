"""Steps and the vision tower take turns on the device."""

from __future__ import annotations

import threading
from types import TracebackType


class DeviceTurns:
    """A lock that is given in the order of asking: so one layer of the tower comes between two steps, and no more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_asked = 0
        self._num_ended = 0

    @property
    def is_awaited(self) -> bool:
        """Another thread waits for its turn. Call it in one's own."""
        return self._num_asked - self._num_ended > 1

    def __enter__(self) -> None:
        with self._changed:
            turn = self._num_asked
            self._num_asked += 1
            while turn != self._num_ended:
                self._changed.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()
