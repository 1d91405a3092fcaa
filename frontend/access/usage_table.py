"""Usage of API keys, now and in the last two minutes, in memory that the workers of a `frontend` command share.

The table has a row for each worker and key. Only that worker writes the row. The rows of a key add up to what it has
used.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.frontend.access.api_keys import MAX_LIMITED_KEYS
from penstock.shm.memory.worker_table import WorkerTable

WINDOW_S = 60
_ROW_WORDS = 16
_NUM_ROWS = 4 * MAX_LIMITED_KEYS
MAX_ROWS = 3 * MAX_LIMITED_KEYS
"""Rows that a worker may use. One in four stays free, so that a search is short and ends."""


class UsageRow(NamedTuple):
    """One worker's counts for one key. minute is a number since CLOCK_MONOTONIC's zero; *_before are the counts of the
    minute before."""

    key_id: int
    in_flight: int = 0
    """Sequences of the requests that have not ended, at least one for each request."""
    reserved: int = 0
    """Tokens that requests in flight may use."""
    released: int = 0
    """Sequences that have ended since the worker started."""
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
        """Whether this minute or the one before has requests or tokens."""
        return bool(self.requests or self.tokens or self.requests_before or self.tokens_before)

    def at(self, minute: int) -> UsageRow:
        """Return the row as of this minute, which is its own or a later one."""
        if minute == self.minute:
            return self
        is_next = minute == self.minute + 1
        before = (self.requests, self.tokens) if is_next else (0, 0)
        return UsageRow(self.key_id, self.in_flight, self.reserved, self.released, minute, 0, 0, *before)


class UsageTable(WorkerTable):
    """The rows of all workers. This worker writes at most `MAX_ROWS`, all its own."""

    label = "penstock-usage"
    words_per_worker = _ROW_WORDS * _NUM_ROWS

    def __init__(self, mapping: mmap.mmap, num_workers: int, worker: int) -> None:
        """Clears the rows of an earlier worker with the same number."""
        super().__init__(mapping, num_workers, worker)
        self.replace(())

    def replace(self, rows: Iterable[UsageRow]) -> None:
        """Replace all rows of this worker at once, so that other workers never miss the rows that stay."""
        fresh = memoryview(array("Q", [0]) * self.words_per_worker)
        for row in rows:
            _write(fresh, _row_offset(fresh, 0, row.key_id), row)
        self.words[self.own_start : self.own_start + self.words_per_worker] = fresh

    def store(self, row: UsageRow) -> None:
        _write(self.words, _row_offset(self.words, self.own_start, row.key_id), row)

    def rows(self, key_id: int) -> Iterator[UsageRow]:
        """Yield every worker's row of this key."""
        for start in self.starts:
            offset = _row_offset(self.words, start, key_id)
            if self.words[offset]:
                yield UsageRow(*self.words[offset : offset + len(UsageRow._fields)])


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
