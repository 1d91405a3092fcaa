"""Rate limits of API keys: their use in the last minute, counted over all workers of one `frontend` command.

The workers share a table in memory that has a row for each worker and key. Only that worker writes the row; to learn
what a key has used, a worker adds up all rows of the key. Two workers that read at the same moment may both admit the
last request, so a limit can be exceeded by one request for each further worker.
"""

from __future__ import annotations

import math
import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.frontend.access.api_keys import MAX_LIMITED_KEYS
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.shm.memory import region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.frontend.access.api_keys import ApiKey
    from penstock.frontend.transport.asgi import Headers

WINDOW_S = 60
_ROW_WORDS = 8
_NUM_ROWS = 4 * MAX_LIMITED_KEYS
_REGION_WORDS = _ROW_WORDS * _NUM_ROWS


class _UsageRow(NamedTuple):
    """One worker's counts for one key. minute counts from CLOCK_MONOTONIC's zero; *_before are of the minute before."""

    key_id: int
    in_flight: int = 0
    minute: int = 0
    requests: int = 0
    tokens: int = 0
    requests_before: int = 0
    tokens_before: int = 0

    def at(self, minute: int) -> _UsageRow:
        """Return the row as it counts in a later minute."""
        if minute == self.minute:
            return self
        is_next = minute == self.minute + 1
        before = (self.requests, self.tokens) if is_next else (0, 0)
        return _UsageRow(self.key_id, self.in_flight, minute, 0, 0, *before)


class UsageTable:
    """The rows of all workers. This worker writes only its own."""

    def __init__(self, mapping: mmap.mmap, num_workers: int = 1, worker: int = 0) -> None:
        """Clears the rows of an earlier worker with the same number."""
        self._words = memoryview(mapping).cast("Q")
        self._num_workers = num_workers
        self._start = worker * _REGION_WORDS
        self.clear()

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

    def clear(self) -> None:
        self._words[self._start : self._start + _REGION_WORDS] = memoryview(bytes(8 * _REGION_WORDS)).cast("Q")

    def store(self, row: _UsageRow) -> None:
        offset = self._row_offset(self._start, row.key_id)
        for index, value in enumerate(row[1:], start=offset + 1):
            self._words[index] = value
        self._words[offset] = row.key_id

    def rows(self, key_id: int) -> Iterator[_UsageRow]:
        """Yield every worker's row of this key."""
        for start in range(0, self._num_workers * _REGION_WORDS, _REGION_WORDS):
            offset = self._row_offset(start, key_id)
            if self._words[offset]:
                yield _UsageRow(*self._words[offset : offset + len(_UsageRow._fields)])

    def _row_offset(self, start: int, key_id: int) -> int:
        """Return the index of the key's row in a region, or of a free one. At least three of four rows are always
        free."""
        row = key_id % _NUM_ROWS
        while self._words[start + _ROW_WORDS * row] not in (0, key_id):
            row = (row + 1) % _NUM_ROWS
        return start + _ROW_WORDS * row


@dataclass(frozen=True, slots=True)
class _Meter:
    """One limit per minute, with the use in this minute and in the one before. share is the elapsed part of this
    minute, 0 to 1."""

    limit: int
    now: int
    before: int
    share: float

    @property
    def remaining(self) -> int:
        """Unused part of the limit. The previous minute counts by its share of the last 60 s, as if its use had been
        even."""
        return max(0, math.floor(self.limit - self.now - self.before * (1 - self.share)))

    @property
    def seconds_to_one(self) -> float:
        """Seconds until one more is allowed, if nothing else is used."""
        if self.remaining:
            return 0.0
        available = self.limit - 1 - self.now
        if available >= 0 and self.before:
            return WINDOW_S * max(0.0, 1 - available / self.before - self.share)
        later = 1 - (self.limit - 1) / self.now if self.now else 0.0
        return WINDOW_S * (1 - self.share + later)

    @property
    def seconds_to_all(self) -> float:
        """Seconds until the whole limit is available, if nothing else is used."""
        minutes = 2 if self.now else 1 if self.before else self.share
        return WINDOW_S * (minutes - self.share)


class Account:
    """Counts one key's use through this worker, and enforces its limits over all workers."""

    def __init__(self, key: ApiKey, table: UsageTable, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._table = table
        self._clock = clock
        self._row = _UsageRow(int.from_bytes(key.salt[:8], "little") | 1)

    def admit(self) -> None:
        """Count a request as in flight until `release`. Raises ApiError: 429 with the headers of `headers`."""
        limits = self.key.limits
        most = limits.requests_in_flight
        if most is not None:
            in_flight = sum(row.in_flight for row in self._table.rows(self._row.key_id))
            if in_flight >= most:
                raise self._refusal(f"this key has {in_flight} requests in flight; its limit is {most}", 1.0)
        for unit, meter in self._meters().items():
            if not meter.remaining:
                message = f"this key has used up its limit of {meter.limit} {unit} per minute; retry later"
                raise self._refusal(message, meter.seconds_to_one)
        row = self._now()
        self._store(row._replace(requests=row.requests + 1))
        self.hold()

    def hold(self) -> None:
        """Count one more request as in flight until `release`."""
        row = self._now()
        self._store(row._replace(in_flight=row.in_flight + 1))

    def release(self) -> None:
        row = self._now()
        self._store(row._replace(in_flight=max(0, row.in_flight - 1)))

    def charge(self, num_tokens: int) -> None:
        row = self._now()
        self._store(row._replace(tokens=row.tokens + num_tokens))

    def headers(self) -> Headers:
        """Return OpenAI's rate limit headers for the limits that the key has."""
        headers: list[tuple[bytes, bytes]] = []
        for unit, meter in self._meters().items():
            for what, value in (
                ("limit", str(meter.limit)),
                ("remaining", str(meter.remaining)),
                ("reset", _duration(meter.seconds_to_all)),
            ):
                headers.append((f"x-ratelimit-{what}-{unit}".encode(), value.encode()))
        return headers

    def move_to(self, key: ApiKey) -> None:
        """Take the same key with new limits; what it has used stays."""
        self.key = key
        self._table.store(self._row)

    def _meters(self) -> dict[str, _Meter]:
        limits = self.key.limits
        minute, share = divmod(self._clock() / WINDOW_S, 1)
        rows = [row.at(int(minute)) for row in self._table.rows(self._row.key_id)]
        meters = {}
        if limits.requests_per_minute is not None:
            used = sum(row.requests for row in rows), sum(row.requests_before for row in rows)
            meters["requests"] = _Meter(limits.requests_per_minute, *used, share)
        if limits.tokens_per_minute is not None:
            used = sum(row.tokens for row in rows), sum(row.tokens_before for row in rows)
            meters["tokens"] = _Meter(limits.tokens_per_minute, *used, share)
        return meters

    def _now(self) -> _UsageRow:
        return self._row.at(int(self._clock() / WINDOW_S))

    def _store(self, row: _UsageRow) -> None:
        self._row = row
        self._table.store(row)

    def _refusal(self, message: str, retry_after_s: float) -> ApiError:
        after = (b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))
        return ApiError(ErrorKind.RATE_LIMITED, message, headers=(after, *self.headers()))


class RateLimiter:
    """The accounts of one worker's keys with limits."""

    def __init__(self, table: UsageTable, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._accounts: dict[bytes, Account] = {}
        self.set_keys(keys)

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys. What a remaining key has used still counts."""
        known, self._accounts = self._accounts, {}
        self._table.clear()
        for key in keys:
            account = known.get(key.salt) or Account(key, self._table, self._clock)
            account.move_to(key)
            self._accounts[key.salt] = account

    def account(self, salt: bytes) -> Account | None:
        """Return the account of the key with this salt; None for a key without limits."""
        return self._accounts.get(salt)


def _duration(seconds: float) -> str:
    """Format seconds as OpenAI does: 1m30s for 90, 500ms for 0.5."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
