"""What the keys with limits have used of late, counted over all workers of one `frontend` command.

A page that the workers share has a row of words for each of them and key, written by that worker alone; to know what a
key has used, a worker adds up all rows of it. Two workers that look at the same moment may both let in what there was
room for once: a limit can be passed by as many requests as there are further workers.
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


class _Row(NamedTuple):
    """One worker's numbers of one key. The minute is CLOCK_MONOTONIC's; `before` is the minute before it."""

    key_id: int
    in_flight: int = 0
    minute: int = 0
    requests: int = 0
    tokens: int = 0
    requests_before: int = 0
    tokens_before: int = 0

    def at(self, minute: int) -> _Row:
        """As it looks in a later minute."""
        if minute == self.minute:
            return self
        is_next = minute == self.minute + 1
        before = (self.requests, self.tokens) if is_next else (0, 0)
        return _Row(self.key_id, self.in_flight, minute, 0, 0, *before)


class UsagePage:
    """The rows of all workers; this one writes only its own."""

    def __init__(self, mapping: mmap.mmap, num_workers: int = 1, worker: int = 0) -> None:
        """Clears what a worker of the same number has left behind."""
        self._words = memoryview(mapping).cast("Q")
        self._num_workers = num_workers
        self._start = worker * _REGION_WORDS
        self.clear()

    @staticmethod
    def create_fd(num_workers: int) -> int:
        """A page for so many workers; the fd is the caller's."""
        fd = region.create("penstock-quotas", 8 * _REGION_WORDS * num_workers)
        region.seal(fd)
        return fd

    @classmethod
    def attach(cls, fd: int, num_workers: int, worker: int) -> UsagePage:
        """Raises RegionError."""
        return cls(region.attach(fd, 8 * _REGION_WORDS * num_workers, writable=True), num_workers, worker)

    @classmethod
    def private(cls) -> UsagePage:
        return cls(mmap.mmap(-1, 8 * _REGION_WORDS))

    def clear(self) -> None:
        self._words[self._start : self._start + _REGION_WORDS] = memoryview(bytes(8 * _REGION_WORDS)).cast("Q")

    def store(self, row: _Row) -> None:
        place = self._place(self._start, row.key_id)
        for index, value in enumerate(row[1:], start=place + 1):
            self._words[index] = value
        self._words[place] = row.key_id

    def rows(self, key_id: int) -> Iterator[_Row]:
        """All workers' rows of this key."""
        for start in range(0, self._num_workers * _REGION_WORDS, _REGION_WORDS):
            place = self._place(start, key_id)
            if self._words[place]:
                yield _Row(*self._words[place : place + len(_Row._fields)])

    def _place(self, start: int, key_id: int) -> int:
        """Where a region has the key's row, or has room for it: three of four rows are always free."""
        row = key_id % _NUM_ROWS
        while self._words[start + _ROW_WORDS * row] not in (0, key_id):
            row = (row + 1) % _NUM_ROWS
        return start + _ROW_WORDS * row


@dataclass(frozen=True, slots=True)
class _Meter:
    """One limit of one minute: what was used in this minute and the one before, at a share of this minute."""

    limit: int
    now: int
    before: int
    share: float

    @property
    def remaining(self) -> int:
        """The minute before counts with the part of it that is less than a minute ago, as if it had been even."""
        return max(0, math.floor(self.limit - self.now - self.before * (1 - self.share)))

    @property
    def seconds_to_one(self) -> float:
        """Until there is one more to have, if nothing else comes."""
        if self.remaining:
            return 0.0
        room = self.limit - 1 - self.now
        if room >= 0 and self.before:
            return WINDOW_S * max(0.0, 1 - room / self.before - self.share)
        later = 1 - (self.limit - 1) / self.now if self.now else 0.0
        return WINDOW_S * (1 - self.share + later)

    @property
    def seconds_to_all(self) -> float:
        minutes = 2 if self.now else 1 if self.before else self.share
        return WINDOW_S * (minutes - self.share)


class Account:
    """What one key uses through this worker, and may use at all."""

    def __init__(self, key: ApiKey, page: UsagePage, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._page = page
        self._clock = clock
        self._row = _Row(int.from_bytes(key.salt[:8], "little") | 1)

    def admit(self) -> None:
        """Counts a request in, until `release`. Raises ApiError: 429 with the headers of `headers`."""
        limits = self.key.limits
        most = limits.requests_in_flight
        if most is not None and sum(row.in_flight for row in self._page.rows(self._row.key_id)) >= most:
            raise self._refusal(f"{most} requests at once is this key's limit", 1.0)
        for unit, meter in self._meters().items():
            if not meter.remaining:
                message = f"{meter.limit} {unit} a minute is this key's limit"
                raise self._refusal(message, meter.seconds_to_one)
        row = self._now()
        self._store(row._replace(requests=row.requests + 1))
        self.hold()

    def hold(self) -> None:
        """One more is in flight, until `release`."""
        row = self._now()
        self._store(row._replace(in_flight=row.in_flight + 1))

    def release(self) -> None:
        row = self._now()
        self._store(row._replace(in_flight=max(0, row.in_flight - 1)))

    def charge(self, num_tokens: int) -> None:
        row = self._now()
        self._store(row._replace(tokens=row.tokens + num_tokens))

    def headers(self) -> Headers:
        """OpenAI's, of the limits that the key has."""
        told: list[tuple[bytes, bytes]] = []
        for unit, meter in self._meters().items():
            for what, value in (
                ("limit", str(meter.limit)),
                ("remaining", str(meter.remaining)),
                ("reset", _duration(meter.seconds_to_all)),
            ):
                told.append((f"x-ratelimit-{what}-{unit}".encode(), value.encode()))
        return told

    def move_to(self, limits: ApiKey) -> None:
        """The key's limits have changed; what it used has not."""
        self.key = limits
        self._page.store(self._row)

    def _meters(self) -> dict[str, _Meter]:
        limits = self.key.limits
        minute, share = divmod(self._clock() / WINDOW_S, 1)
        rows = [row.at(int(minute)) for row in self._page.rows(self._row.key_id)]
        meters = {}
        if limits.requests_per_minute is not None:
            used = sum(row.requests for row in rows), sum(row.requests_before for row in rows)
            meters["requests"] = _Meter(limits.requests_per_minute, *used, share)
        if limits.tokens_per_minute is not None:
            used = sum(row.tokens for row in rows), sum(row.tokens_before for row in rows)
            meters["tokens"] = _Meter(limits.tokens_per_minute, *used, share)
        return meters

    def _now(self) -> _Row:
        return self._row.at(int(self._clock() / WINDOW_S))

    def _store(self, row: _Row) -> None:
        self._row = row
        self._page.store(row)

    def _refusal(self, message: str, retry_after_s: float) -> ApiError:
        after = (b"retry-after", b"%d" % max(1, math.ceil(retry_after_s)))
        return ApiError(ErrorKind.RATE_LIMITED, message, headers=(after, *self.headers()))


class RateLimiter:
    """The accounts of one worker's keys."""

    def __init__(self, page: UsagePage, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._clock = clock
        self._accounts: dict[bytes, Account] = {}
        self.set_keys(keys)

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Keys that stay keep what they have used."""
        known, self._accounts = self._accounts, {}
        self._page.clear()
        for key in keys:
            account = known.get(key.salt) or Account(key, self._page, self._clock)
            account.move_to(key)
            self._accounts[key.salt] = account

    def account(self, salt: bytes) -> Account | None:
        """Of the key with this salt; None where it has no limits."""
        return self._accounts.get(salt)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 90 s is 1m30s, half a second 500ms."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
