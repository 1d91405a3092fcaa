"""The requests that one worker has open: keep-alive comments, clients that do not read, draining."""

from __future__ import annotations

import asyncio
import time

from penstock.frontend.transport.errors import shutting_down
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.incomplete import IncompleteBodies
from penstock.process.admission import DrainRate, TenantPlaces

_SWEEP_INTERVAL_S = 1.0
_LAST_BODY_TIMEOUT_S = 5.0
"""How long a body may still take to arrive while the server drains."""


class OpenExchanges:
    """All requests that are not finished. `run` must run beside them."""

    def __init__(self, *, max_open: int, keep_alive_interval_s: float, client_timeout_s: float) -> None:
        """At most max_open requests of a single tenant whose bodies have arrived, and as many whose bodies have not."""
        self._draining_since_s: float | None = None
        self.incomplete = IncompleteBodies(max_open)
        self.places = TenantPlaces(max_open)
        """Taken by requests whose bodies have arrived: nobody can take others' places by sending slowly."""
        self._keep_alive_interval_s = keep_alive_interval_s
        self._client_timeout_s = client_timeout_s
        self._open: set[Exchange] = set()
        self._payer_of: dict[Exchange, bytes] = {}
        """Who pays for each request that has a place."""
        self._num_finished = 0
        self._finish_rate = DrainRate()
        self._idle_actions: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_draining(self) -> bool:
        """Whether new requests should go to other servers. Requests that still arrive are answered."""
        return self._draining_since_s is not None

    def add(self, exchange: Exchange) -> None:
        self._open.add(exchange)

    def discard(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        if (payer := self._payer_of.pop(exchange, None)) is not None:
            self.places.release(payer)
            self._num_finished += 1
            self._finish_rate.note(self._num_finished)

    def take_place(self, exchange: Exchange) -> None:
        """Give a request that is open its payer's place until it is discarded, whether or not there is one."""
        self._payer_of[exchange] = exchange.payer
        self.places.take(exchange.payer)

    def retry_after_s(self) -> int:
        """Return the seconds until anyone has a place, at the recent rate."""
        return self._finish_rate.retry_after_s(1 + self.places.num_taken - self.places.limit, self._num_finished)

    async def run(self) -> None:
        """Sweep at intervals. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(_SWEEP_INTERVAL_S, self._keep_alive_interval_s / 2))
            self.sweep(time.monotonic())

    def sweep(self, now_s: float) -> None:
        """Drop clients that do not read; let silent event streams write a comment; while the server drains, end
        requests whose bodies take long."""
        for exchange in list(self._open):
            if exchange in self.incomplete:
                since_s = self._draining_since_s
                if since_s is not None and now_s - max(since_s, exchange.received_s) >= _LAST_BODY_TIMEOUT_S:
                    exchange.abort(shutting_down())
            elif exchange.sending_since_s:
                if now_s - exchange.sending_since_s >= self._client_timeout_s:
                    exchange.drop()
            elif exchange.idle_action and now_s - exchange.last_sent_s >= self._silence_s(exchange):
                task = asyncio.ensure_future(exchange.idle_action())
                self._idle_actions.add(task)
                task.add_done_callback(self._idle_actions.discard)

    def _silence_s(self, exchange: Exchange) -> float:
        """Return how long the exchange may send nothing. Its client learns soon that the backend is away."""
        return _SWEEP_INTERVAL_S if exchange.waits_for_backend() else self._keep_alive_interval_s

    def start_draining(self) -> None:
        """From now on bodies must arrive soon. Requests continue, and those that arrive run."""
        self._draining_since_s = time.monotonic()

    def end_all(self) -> None:
        """End every open request with an error that says the server is shutting down."""
        for exchange in list(self._open):
            exchange.abort(shutting_down())
