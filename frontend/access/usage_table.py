"""What API keys have used in the last minute and hold now, in memory that all workers of a `frontend` command share.

The table has a row for each worker and key. Only that worker writes the row; to learn what a key has used, a worker
adds up all rows of the key.
"""

from __future__ import annotations

import mmap
from array import array
from typing import TYPE_CHECKING, NamedTuple

from penstock.frontend.access.api_keys import MAX_LIMITED_KEYS
from penstock.shm.memory import region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WINDOW_S = 60
_ROW_WORDS = 16
_NUM_ROWS = 4 * MAX_LIMITED_KEYS
MAX_ROWS = 3 * MAX_LIMITED_KEYS
"""Rows that a worker may use: one in four stays free, so that searches are short and end."""
_REGION_WORDS = _ROW_WORDS * _NUM_ROWS


class UsageRow(NamedTuple):
    """One worker's counts for one key. minute counts from CLOCK_MONOTONIC's zero; *_before are of the minute before."""

    key_id: int
    in_flight: int = 0
    """Sequences of requests that have not ended; at least one a request."""
    reserved: int = 0
    """Tokens that requests in flight may use."""
    released: int = 0
    """Sequences that were in flight and have ended, since the worker began."""
    minute: int = 0
    requests: int = 0
    tokens: int = 0
    requests_before: int = 0
    tokens_before: int = 0

    @property
    def is_held(self) -> bool:
        """Whether a request in flight counts here."""
        return bool(self.in_flight or self.reserved)

    @property
    def has_uses(self) -> bool:
        """Whether something of this minute or the one before counts here."""
        return bool(self.requests or self.tokens or self.requests_before or self.tokens_before)

    def at(self, minute: int) -> UsageRow:
        """Return the row as it counts in a later minute."""
        if minute == self.minute:
            return self
        is_next = minute == self.minute + 1
        before = (self.requests, self.tokens) if is_next else (0, 0)
        return UsageRow(self.key_id, self.in_flight, self.reserved, self.released, minute, 0, 0, *before)


class UsageTable:
    """The rows of all workers. This worker writes only its own, `MAX_ROWS` at most."""

    def __init__(self, mapping: mmap.mmap, num_workers: int = 1, worker: int = 0) -> None:
        """Clears the rows of an earlier worker with the same number."""
        self._words = memoryview(mapping).cast("Q")
        self._num_workers = num_workers
        self._start = worker * _REGION_WORDS
        self.replace(())

    @staticmethod
    def create_fd(num_workers: int) -> int:
        """Return the fd of a table for so many workers. The caller owns it."""
        fd = region.create("penstock-usage", 8 * _REGION_WORDS * num_workers)
        region.seal(fd)
        return fd

    @classmethod
    def attach(cls, fd: int, num_workers: int, worker: int) -> UsageTable:
        """Raises RegionError."""
        return cls(region.attach(fd, 8 * _REGION_WORDS * num_workers, writable=True), num_workers, worker)

    @classmethod
    def private(cls) -> UsageTable:
        return cls(mmap.mmap(-1, 8 * _REGION_WORDS))

    def replace(self, rows: Iterable[UsageRow]) -> None:
        """Replace all rows of this worker at once, so that other workers never see the kept ones missing."""
        fresh = memoryview(array("Q", bytes(8 * _REGION_WORDS)))
        for row in rows:
            _write(fresh, _row_offset(fresh, 0, row.key_id), row)
        self._words[self._start : self._start + _REGION_WORDS] = fresh

    def store(self, row: UsageRow) -> None:
        _write(self._words, _row_offset(self._words, self._start, row.key_id), row)

    def rows(self, key_id: int) -> Iterator[UsageRow]:
        """Yield every worker's row of this key."""
        for start in range(0, self._num_workers * _REGION_WORDS, _REGION_WORDS):
            offset = _row_offset(self._words, start, key_id)
            if self._words[offset]:
                yield UsageRow(*self._words[offset : offset + len(UsageRow._fields)])


def _write(words: memoryview[int], offset: int, row: UsageRow) -> None:
    for index, value in enumerate(row[1:], start=offset + 1):
        words[index] = value
    words[offset] = row.key_id


def _row_offset(words: memoryview[int], start: int, key_id: int) -> int:
    """Return the index of the key's row in a worker's region, or of a free one."""
    row = key_id % _NUM_ROWS
    while words[start + _ROW_WORDS * row] not in (0, key_id):
        row = (row + 1) % _NUM_ROWS
    return start + _ROW_WORDS * row
