"""A table of 64-bit words in memory that the workers of one command share."""

from __future__ import annotations

import mmap
from typing import ClassVar, Self

from penstock.shm.memory import region

_WORD_BYTES = 8


class WorkerTable:
    """A part for each worker. Any worker reads all parts; only its own worker writes a part, so no lock is needed."""

    label: ClassVar[str]
    """The memory's name in /proc."""
    words_per_worker: ClassVar[int]

    def __init__(self, mapping: mmap.mmap, num_workers: int, worker: int) -> None:
        """The part of this worker may contain what an earlier worker with the same number left."""
        self.words = memoryview(mapping).cast("Q")
        self.starts = range(0, num_workers * self.words_per_worker, self.words_per_worker)
        """Indices at which the workers' parts begin."""
        self.own_start = self.starts[worker]

    @classmethod
    def create_fd(cls, num_workers: int) -> int:
        """Return the fd of a table for this many workers. The caller owns it. Raises OSError."""
        fd = region.create(cls.label, cls._num_bytes(num_workers))
        region.seal(fd)
        return fd

    @classmethod
    def attach(cls, fd: int, num_workers: int, worker: int) -> Self:
        """The fd stays the caller's. Raises RegionError."""
        return cls(region.attach(fd, cls._num_bytes(num_workers), writable=True), num_workers, worker)

    @classmethod
    def alone(cls) -> Self:
        """Return a table for one worker, which no other process sees."""
        return cls(mmap.mmap(-1, cls._num_bytes(1)), 1, 0)

    @classmethod
    def _num_bytes(cls, num_workers: int) -> int:
        return _WORD_BYTES * cls.words_per_worker * num_workers
