"""Shared memory that says which models are awake and who uses them, for the workers and the process that starts
backends."""

from __future__ import annotations

import enum
import time
from typing import Self

from penstock.shm.memory.worker_table import WorkerTable

MAX_MODELS = 256
"""Models of one server. Each needs a client in every worker."""
_ROW_WORDS = 40
_STATE, _WAKE_US, _FAILURES, _RETRY_NS, _REASON_BYTES, _REASON = range(6)
_OPEN, _USED_NS, _UNLOAD_NS, _KEPT_NS = range(4)
_MAX_REASON_BYTES = 8 * (_ROW_WORDS - _REASON)


class ModelState(enum.IntEnum):
    """A model's state. The numbers are in shared memory."""

    ASLEEP = 0
    STARTING = 1
    """It is loaded because the server starts."""
    LOADING = 2
    """It is loaded because a request waits for it."""
    AWAKE = 3
    FALLING_ASLEEP = 4


class ModelTable(WorkerTable):
    """A table with one part for each worker, which counts its open requests by model, and one for the owner.

    The owner's part has each model's state. Each process writes its own part only.
    """

    label = "penstock-models"
    words_per_worker = _ROW_WORDS * MAX_MODELS

    @classmethod
    def create(cls, num_workers: int) -> tuple[int, Self]:
        """Return an fd for the workers, and the table of the process that owns the models. Raises OSError."""
        fd = cls.create_fd(num_workers + 1)
        return fd, cls.attach(fd, num_workers + 1, num_workers)

    @classmethod
    def of_worker(cls, fd: int, num_workers: int, worker: int) -> Self:
        """Return a worker's table, without what an earlier worker of this number left. Raises RegionError."""
        table = cls.attach(fd, num_workers + 1, worker)
        for model in range(MAX_MODELS):
            table.note_use(model, 0, 0)
        return table

    # Written by workers

    def note_use(self, model: int, num_open: int, used_ns: int, kept_ns: int = 0) -> None:
        """Say how many requests of this worker need the model.

        used_ns and kept_ns, until when the last of them keeps it awake, are CLOCK_MONOTONIC times; 0: the server's
        own time.
        """
        row = self.own_start + _ROW_WORDS * model
        self.words[row + _KEPT_NS] = kept_ns
        self.words[row + _USED_NS] = used_ns
        self.words[row + _OPEN] = num_open

    def uses(self, model: int) -> tuple[int, int, int]:
        """Return the open requests of all workers, the time of the last use, and until when that keeps the model."""
        rows = [start + _ROW_WORDS * model for start in self.starts[:-1]]
        used_ns, kept_ns = max((self.words[row + _USED_NS], self.words[row + _KEPT_NS]) for row in rows)
        return sum(self.words[row + _OPEN] for row in rows), used_ns, kept_ns

    def ask_to_sleep(self, model: int) -> None:
        """Ask that the model go to sleep, if no request needs it when the owner looks."""
        self.words[self.own_start + _ROW_WORDS * model + _UNLOAD_NS] = time.monotonic_ns()

    def asked_ns(self, model: int) -> int:
        """Return when a worker last asked that the model sleep; 0 if never."""
        return max(self.words[start + _ROW_WORDS * model + _UNLOAD_NS] for start in self.starts[:-1])

    # Written by the owner

    def set_state(self, model: int, state: ModelState, *, wake_s: float | None = None) -> None:
        row = self._owner_row(model)
        if wake_s is not None:
            self.words[row + _WAKE_US] = round(1e6 * wake_s)
        self.words[row + _STATE] = state

    def fail(self, model: int, reason: str, retry_after_s: float) -> None:
        """Record why the model cannot be loaded, and when the next attempt may begin. The model is asleep then."""
        row = self._owner_row(model)
        text = reason.encode()[:_MAX_REASON_BYTES]
        words = memoryview(text.ljust(_MAX_REASON_BYTES, b"\0")).cast("Q")
        self.words[row + _REASON : row + _ROW_WORDS] = words
        self.words[row + _REASON_BYTES] = len(text)
        self.words[row + _RETRY_NS] = time.monotonic_ns() + round(1e9 * retry_after_s)
        self.words[row + _FAILURES] += 1
        self.set_state(model, ModelState.ASLEEP)

    def state(self, model: int) -> ModelState:
        return ModelState(self.words[self._owner_row(model) + _STATE])

    def wake_s(self, model: int) -> float | None:
        """Return how long the last wake took; None before the first."""
        return self.words[self._owner_row(model) + _WAKE_US] / 1e6 or None

    def failures(self, model: int) -> int:
        return self.words[self._owner_row(model) + _FAILURES]

    def reason(self, model: int) -> str:
        """Return why the last failed wake failed."""
        row = self._owner_row(model)
        text = bytes(self.words[row + _REASON : row + _ROW_WORDS].cast("B"))
        return text[: self.words[row + _REASON_BYTES]].decode(errors="replace")

    def seconds_to_retry(self, model: int) -> float:
        """Return how long the model stays asleep after a failure; 0 without a recent one."""
        return max(0.0, (self.words[self._owner_row(model) + _RETRY_NS] - time.monotonic_ns()) / 1e9)

    def _owner_row(self, model: int) -> int:
        return self.starts[-1] + _ROW_WORDS * model
