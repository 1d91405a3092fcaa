"""Limits of API keys, over all workers: a request claims what it may use, and settles with what it used.

Claims are exact: a worker writes its claim first and adds up second. If two workers claim the last place at the same
moment, both may be refused, but never both admitted.

Three things are inexact. If a request has no max_tokens, its tokens count as they are generated, so they can exceed the
limit. At the turn of a minute a worker may read a row that another has half written. If a worker dies, its claims are
lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock.frontend.access.api_keys import MAX_LIMITED_KEYS, ApiKey
from penstock.frontend.access.usage_table import MAX_ROWS, WINDOW_S, UsageRow, UsageTable
from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, retry_later
from penstock.frontend.transport.exchange import PlannedUse
from penstock.process.admission import DrainRate

_LIVE_STEP_TOKENS = 256
"""A claim that is used up grows by this much, so that generated tokens rarely write the table."""


@dataclass(frozen=True, slots=True)
class _Meter:
    """A limit per minute, with the use in this minute and in the one before. now includes what requests in flight have
    reserved. share is the elapsed part of this minute, 0 to 1."""

    limit: int
    now: int
    before: int
    share: float

    @property
    def _left(self) -> float:
        """The previous minute counts by its share of the last 60 s, as if its use had been even."""
        return self.limit - self.now - self.before * (1 - self.share)

    @property
    def is_exceeded(self) -> bool:
        return self._left < 0

    @property
    def remaining(self) -> int:
        """Unused part of the limit."""
        return max(0, math.floor(self._left))

    def seconds_to(self, amount: int) -> float:
        """Seconds until this amount, at most the limit, is available if nothing else is used."""
        if self.remaining >= amount:
            return 0.0
        available = self.limit - amount - self.now
        if available >= 0 and self.before:
            return WINDOW_S * max(0.0, 1 - available / self.before - self.share)
        later = 1 - (self.limit - amount) / self.now if self.now else 0.0
        return WINDOW_S * (1 - self.share + later)

    @property
    def seconds_to_all(self) -> float:
        """Seconds until the whole limit is available, if nothing else is used."""
        minutes = 2 if self.now else 1 if self.before else self.share
        return WINDOW_S * (minutes - self.share)


class Account:
    """Counts one key's use through this worker, and enforces its limits over all workers.

    A key keeps its account in a worker while any of its requests is in flight, even if the key is removed meanwhile.
    """

    def __init__(self, key: ApiKey, table: UsageTable, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.row = UsageRow(int.from_bytes(key.salt[:8], "little") | 1)
        self._table = table
        self._clock = clock
        self._release_rate = DrainRate(clock)

    def admit(self) -> Claim:
        """Claim one request and one sequence until `Claim.release`. Raises ApiError: 429 with `headers`."""
        try:
            self._claim(1, 0, num_requests=1)
        except ApiError as error:
            error.headers = (*error.headers, *self.headers())
            raise
        return Claim(self)

    def readmit(self) -> Claim:
        """Claim for a request that a worker admitted before it died. No limit refuses it again."""
        self.change(num_sequences=1)
        return Claim(self, is_admitted=True)

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

    @property
    def is_counted(self) -> bool:
        """Whether uses of the last two minutes, or a request in flight, still count."""
        row = self._now()
        return row.is_held or row.has_uses

    # Called by claims

    def reserve(self, planned: PlannedUse) -> tuple[int, int]:
        """Claim what a request needs beyond its first sequence. Return the added sequences and tokens.

        Raises ApiError: 400 if the request alone exceeds a limit, 429 if it does so together with the key's others.
        """
        limits = self.key.limits
        most = limits.requests_in_flight
        if most is not None and planned.num_sequences > most:
            message = f"{planned.num_sequences} choices over all prompts; the limit of this key is {most} in flight"
            invalid(planned.sequences_field, message)
        num_tokens = planned.prompt_tokens + planned.answer_tokens
        if (per_minute := limits.tokens_per_minute) is not None:
            least = planned.prompt_tokens + (planned.answer_tokens if planned.is_stated else 1)
            if least > per_minute:
                message = f"{least} tokens with the prompt; the limit of this key is {per_minute} per minute"
                invalid(planned.tokens_field, message)
            if not planned.is_stated:
                num_tokens = max(least, min(num_tokens, self._meters()["tokens"].remaining))
        self._claim(planned.num_sequences - 1, num_tokens)
        return planned.num_sequences - 1, num_tokens

    def change(self, *, num_sequences: int = 0, num_reserved: int = 0, num_used: int = 0) -> None:
        """Add to the counts, even beyond a limit. num_sequences is negative when sequences end."""
        row = self._now()
        num_released = max(0, -num_sequences)
        self._store(
            row._replace(
                in_flight=row.in_flight + num_sequences,
                reserved=row.reserved + num_reserved,
                tokens=row.tokens + num_used,
                released=row.released + num_released,
            )
        )
        if num_released:
            self._release_rate.note(sum(other.released for other in self._rows()))

    def _claim(self, num_sequences: int, num_tokens: int, num_requests: int = 0) -> None:
        """Add to the counts. If that exceeds a limit, raises ApiError and adds nothing."""
        before = self._now()
        self._store(
            before._replace(
                in_flight=before.in_flight + num_sequences,
                reserved=before.reserved + num_tokens,
                requests=before.requests + num_requests,
            )
        )
        refusal = self._in_flight_refusal(num_sequences, num_requests) or self._rate_refusal(num_tokens, num_requests)
        if refusal is not None:
            self._store(before)
            message, retry_after_s = refusal
            raise retry_later(ErrorKind.RATE_LIMITED, message, math.ceil(retry_after_s))

    def _in_flight_refusal(self, num_sequences: int, num_requests: int) -> tuple[str, float] | None:
        """Return the message and the seconds to wait if the stored claim of num_sequences exceeds the limit."""
        most = self.key.limits.requests_in_flight
        rows = list(self._rows())
        in_flight = sum(row.in_flight for row in rows)
        if most is None or in_flight <= most:
            return None
        needed = "" if num_requests else f" with this one, whose choices need {num_sequences} more"
        message = f"this key has {in_flight - num_sequences} requests in flight{needed}; its limit is {most}"
        num_released = sum(row.released for row in rows)
        return message, self._release_rate.retry_after_s(in_flight - most, num_released)

    def _rate_refusal(self, num_tokens: int, num_requests: int) -> tuple[str, float] | None:
        """Return the message and the seconds to wait if the claim, now stored, exceeds a limit per minute."""
        for unit, meter in self._meters().items():
            amount = num_requests if unit == "requests" else num_tokens
            # A request is admitted before its tokens are known: then at least one must be left.
            if not meter.is_exceeded and (amount or unit == "requests" or meter.remaining):
                continue
            free = replace(meter, now=meter.now - amount)
            message = f"this key has used up its limit of {meter.limit} {unit} per minute; retry later"
            if amount > 1:
                message = (
                    f"this request may use {amount} {unit}, but this key has {free.remaining} left of its limit of "
                    f"{meter.limit} per minute; retry later"
                )
            return message, free.seconds_to(max(1, amount))
        return None

    def _meters(self) -> dict[str, _Meter]:
        limits = self.key.limits
        minute, share = divmod(self._clock() / WINDOW_S, 1)
        rows = [row.at(int(minute)) for row in self._rows()]
        meters = {}
        if limits.requests_per_minute is not None:
            used = sum(row.requests for row in rows), sum(row.requests_before for row in rows)
            meters["requests"] = _Meter(limits.requests_per_minute, *used, share)
        if limits.tokens_per_minute is not None:
            used = sum(row.tokens + row.reserved for row in rows), sum(row.tokens_before for row in rows)
            meters["tokens"] = _Meter(limits.tokens_per_minute, *used, share)
        return meters

    def _rows(self) -> Iterable[UsageRow]:
        return self._table.rows(self.row.key_id)

    def _now(self) -> UsageRow:
        return self.row.at(int(self._clock() / WINDOW_S))

    def _store(self, row: UsageRow) -> None:
        self.row = row
        self._table.store(row)


class Claim:
    """One request's part of its key's limits, until every exchange that shares the claim has released it."""

    def __init__(self, account: Account, *, is_admitted: bool = False) -> None:
        """The account has counted one sequence for it. is_admitted: it has passed the key's limits before."""
        self._account = account
        self._is_admitted = is_admitted
        self._num_sequences = 1
        self._num_reserved = 0
        self._num_holders = 1

    def share(self) -> None:
        """Add a holder: another exchange that continues the request."""
        self._num_holders += 1

    def reserve(self, planned: PlannedUse) -> None:
        """Claim the most that the request will use. Raises ApiError: 400 if it exceeds a limit alone, else 429."""
        if self._is_admitted:
            num_sequences, num_tokens = planned.num_sequences - 1, planned.prompt_tokens + planned.answer_tokens
            self._account.change(num_sequences=num_sequences, num_reserved=num_tokens)
        else:
            num_sequences, num_tokens = self._account.reserve(planned)
        self._num_sequences += num_sequences
        self._num_reserved += num_tokens

    def grow_to(self, num_tokens: int) -> None:
        """Count tokens that are used beyond the reserved ones at once."""
        if num_tokens > self._num_reserved:
            added = num_tokens - self._num_reserved + _LIVE_STEP_TOKENS
            self._account.change(num_reserved=added)
            self._num_reserved += added

    def settle(self, num_tokens: int) -> None:
        """Replace the reserved tokens by those that were used."""
        reserved, self._num_reserved = self._num_reserved, 0
        self._account.change(num_reserved=-reserved, num_used=num_tokens)

    def release(self) -> None:
        """Call once for each holder. The last call frees the sequences, and reserved tokens that were not settled."""
        self._num_holders -= 1
        if not self._num_holders:
            self._account.change(num_sequences=-self._num_sequences, num_reserved=-self._num_reserved)
            self._num_sequences = self._num_reserved = 0

    def headers(self) -> Headers:
        """Return OpenAI's rate limit headers."""
        return self._account.headers()


class RateLimiter:
    """The accounts of one worker's keys with limits, and of removed keys that still have uses or requests in flight."""

    def __init__(self, table: UsageTable, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._accounts: dict[bytes, Account] = {}
        self._removed: dict[bytes, Account] = {}
        self.set_keys(keys)

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys.

        A removed key's use and its requests in flight still count. Raises ValueError while too many removed keys have
        requests in flight; then the old keys stay.
        """
        known = self._removed | self._accounts
        added = {key.salt: key for key in keys}
        removed = {salt: account for salt, account in known.items() if salt not in added and account.is_counted}
        for salt in [salt for salt, account in removed.items() if not account.row.is_held][MAX_LIMITED_KEYS:]:
            del removed[salt]
        if len(added) + len(removed) > MAX_ROWS:
            raise ValueError(f"{len(removed)} removed keys still have requests in flight; reload again later")
        self._removed = removed
        self._accounts = {
            salt: known.get(salt) or Account(key, self._table, self._clock) for salt, key in added.items()
        }
        for salt, account in self._accounts.items():
            account.key = added[salt]
        self._table.replace(account.row for account in (removed | self._accounts).values())

    def account(self, salt: bytes) -> Account | None:
        """Return the account of the key with this salt; None for a key without limits."""
        return self._accounts.get(salt)


def _duration(seconds: float) -> str:
    """Format seconds as OpenAI does: 1m30s for 90, 500ms for 0.5."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
