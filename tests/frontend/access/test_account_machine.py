"""Claims of keys' limits over several workers, while requests begin and end and keys come and go in any order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.frontend.access.api_keys import ApiKey, KeyLimits
from penstock.frontend.access.rate_limits import Account, Claim, RateLimiter
from penstock.frontend.access.usage_table import UsageRow, UsageTable
from penstock.frontend.transport.errors import ApiError
from penstock.frontend.transport.exchange import PlannedUse

_NUM_WORKERS = 2
_NAMES = ("a", "b")
_limits = st.builds(KeyLimits, requests_in_flight=st.integers(1, 8), tokens_per_minute=st.none() | st.integers(20, 200))


def _key(name: str, limits: KeyLimits) -> ApiKey:
    return ApiKey(name.encode(), name, limits)


@dataclass
class _Request:
    worker: int
    name: str
    account: Account
    claim: Claim
    num_sequences: int = 1
    num_reserved: int = 0
    num_holders: int = 1
    is_settled: bool = False


@dataclass
class _Worker:
    limiter: RateLimiter
    limits: dict[str, KeyLimits] = field(default_factory=dict)


class AccountMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 6000.0
        self.fd = UsageTable.create_fd(_NUM_WORKERS)
        self.reader = UsageTable.attach(self.fd, _NUM_WORKERS, 0)
        self.workers = [
            self._start(number, dict.fromkeys(_NAMES, KeyLimits(requests_in_flight=4)))
            for number in range(_NUM_WORKERS)
        ]
        self.requests: list[_Request] = []

    def _start(self, number: int, limits: dict[str, KeyLimits]) -> _Worker:
        table = UsageTable.attach(self.fd, _NUM_WORKERS, number)
        keys = [_key(name, value) for name, value in limits.items()]
        return _Worker(RateLimiter(table, keys, lambda: self.now_s), limits)

    def _rows(self, name: str) -> list[UsageRow]:
        key_id = int.from_bytes(_key(name, KeyLimits()).salt[:8], "little") | 1
        return [row.at(int(self.now_s / 60)) for row in self.reader.rows(key_id)]

    def _in_flight(self, name: str) -> int:
        return sum(request.num_sequences for request in self.requests if request.name == name)

    @rule(number=st.integers(0, _NUM_WORKERS - 1), limits=st.dictionaries(st.sampled_from(_NAMES), _limits))
    def reload(self, number: int, limits: dict[str, KeyLimits]) -> None:
        self._reload(number, limits)

    @rule(number=st.integers(0, _NUM_WORKERS - 1), limits=st.fixed_dictionaries(dict.fromkeys(_NAMES, _limits)))
    def remove_all_and_add_again(self, number: int, limits: dict[str, KeyLimits]) -> None:
        self._reload(number, {})
        self.every_row_is_what_its_requests_hold()
        self._reload(number, limits)

    def _reload(self, number: int, limits: dict[str, KeyLimits]) -> None:
        worker = self.workers[number]
        worker.limits = limits
        worker.limiter.set_keys([_key(name, value) for name, value in limits.items()])

    @rule(number=st.integers(0, _NUM_WORKERS - 1))
    def die_and_restart(self, number: int) -> None:
        self.requests = [request for request in self.requests if request.worker != number]
        self.workers[number] = self._start(number, self.workers[number].limits)

    @rule(number=st.integers(0, _NUM_WORKERS - 1), name=st.sampled_from(_NAMES))
    def begin(self, number: int, name: str) -> None:
        account = self.workers[number].limiter.account(_key(name, KeyLimits()).salt)
        if account is None:
            assert name not in self.workers[number].limits
            return
        # A request in flight never keeps an account of its own beside that of its key.
        others = [request for request in self.requests if (request.worker, request.name) == (number, name)]
        assert all(request.account is account for request in others)
        before = self._in_flight(name)
        most = account.key.limits.requests_in_flight
        assert most is not None
        remaining = dict(account.headers()).get(b"x-ratelimit-remaining-tokens")
        is_free = before < most and remaining != b"0"
        try:
            claim = account.admit()
        except ApiError:
            assert not is_free
            return
        assert is_free
        self.requests.append(_Request(number, name, account, claim))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_sequences=st.integers(1, 8), num_tokens=st.integers(1, 100), is_stated=st.booleans())
    def reserve(self, data: st.DataObject, num_sequences: int, num_tokens: int, is_stated: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.num_reserved or request.is_settled:
            return
        limits = request.account.key.limits
        planned = PlannedUse(num_sequences, "n", num_tokens, num_tokens, "max_tokens", is_stated)
        before = self._in_flight(request.name)
        try:
            request.claim.reserve(planned)
        except ApiError:
            return
        request.num_sequences = num_sequences
        rows = self._rows(request.name)
        request.num_reserved = sum(row.reserved for row in rows) - self._reserved(request.name)
        assert (
            limits.requests_in_flight is None
            or before - 1 + num_sequences <= limits.requests_in_flight
            or (num_sequences == 1)
        )
        if limits.tokens_per_minute is not None:
            assert sum(row.tokens + row.reserved for row in rows) <= limits.tokens_per_minute

    def _reserved(self, name: str) -> int:
        return sum(request.num_reserved for request in self.requests if request.name == name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(0, 300))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request.is_settled:
            request.claim.grow_to(num_tokens)
            rows = self._rows(request.name)
            request.num_reserved += sum(row.reserved for row in rows) - self._reserved(request.name)
            assert request.num_reserved >= num_tokens

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(0, 300))
    def settle(self, data: st.DataObject, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if not request.is_settled:
            request.claim.settle(num_tokens)
            request.num_reserved, request.is_settled = 0, True

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.claim.share()
        request.num_holders += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.requests)))

    def _end(self, request: _Request) -> None:
        request.claim.release()
        request.num_holders -= 1
        if not request.num_holders:
            self.requests.remove(request)

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def every_row_is_what_its_requests_hold(self) -> None:
        for name in _NAMES:
            rows = self._rows(name)
            assert sum(row.in_flight for row in rows) == self._in_flight(name)
            assert sum(row.reserved for row in rows) == self._reserved(name)

    def teardown(self) -> None:
        while self.requests:
            self._end(self.requests[0])
        self.every_row_is_what_its_requests_hold()
        os.close(self.fd)


TestAccounts = AccountMachine.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=40)
