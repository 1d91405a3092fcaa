"""Ends requests early: the client or the operator cancels, the frontend dies, or the deadline passes."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.backend.engine.requests.delivery import Delivery, keep_end
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.engine.requests.stream_table import StreamTable
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import Failure, FailureCode, Finish, Keep, RequestName


class Canceller:
    """A cancelled request is gone at once. If its sequence has no other subscriber, the scheduler drops it: pages and
    slot are free for the next plan, and rows in plans already made are dropped when their step is launched."""

    def __init__(
        self,
        board: BackendBoard,
        open_requests: RequestTable,
        delivery: Delivery,
        streams: StreamTable,
        clock: Callable[[], float],
    ) -> None:
        self._streams = streams
        self._board = board
        self._open_requests = open_requests
        self._delivery = delivery
        self._clock = clock

    def cancel(self, frontend: int, request_id: int, noticed_ns: int = 0, keep: Keep = Keep.NOTHING) -> None:
        """End one request. An unknown id is normal: a cancel may cross the end of its request, or come twice.

        noticed_ns is the CLOCK_MONOTONIC time at which the frontend noticed; 0 if unknown.
        """
        if self._open_requests.remove_waiting(frontend, request_id):
            self._board.requests_accepted += 1
            self._board.requests_cancelled += 1
        elif (found := self._open_requests.find(frontend, request_id)) is not None:
            if (choice := found.subscriber.resumable) is not None and keep is Keep.ALL:
                self._streams.detach(found, choice)
                return
            if keep is Keep.TOKENS:
                keep_end(*found, Finish.LENGTH)
            self._open_requests.remove(*found)
            self._board.requests_cancelled += 1
            if noticed_ns and found.sequence.ended:
                self._board.observe_cancel(max(0, time.monotonic_ns() - noticed_ns) // 1000)

    def cancel_for_operator(self, frontend: int, request_id: int, target: RequestName) -> None:
        """End the target, a request of any frontend, and answer the request that asks for it."""
        owner, name = target.frontend, target.request_id
        if not self._open_requests.is_open(owner, name):
            not_open = Failure(request_id, FailureCode.NOT_OPEN)
            self._delivery.answer(frontend, request_id, Finish.REJECTED, not_open)
            return
        failure = Failure(name, FailureCode.CANCELLED)
        self._delivery.end(owner, name, Finish.FAILED, failure=failure)
        self._remove_ended(owner, name, Finish.FAILED, failure)
        self._delivery.answer(frontend, request_id, Finish.STOP)

    def _remove_ended(self, frontend: int, request_id: int, finish: Finish, failure: Failure | None = None) -> None:
        if (found := self._open_requests.find(frontend, request_id)) is not None:
            keep_end(*found, finish, failure)
            self._open_requests.remove(*found)
        else:
            self._open_requests.remove_waiting(frontend, request_id)
            self._board.requests_accepted += 1

    def drop_frontend(self, frontend: int) -> None:
        """End all requests of a frontend that has died, except those that linger."""
        num_removed = self._open_requests.remove_waiting_of(frontend)
        self._board.requests_accepted += num_removed
        self._board.requests_cancelled += num_removed
        for request in self._open_requests.of_frontend(frontend):
            if (choice := request.subscriber.resumable) is not None:
                self._streams.detach(request, choice)
            else:
                self._open_requests.remove(*request)
                self._board.requests_cancelled += 1

    def expire(self) -> None:
        """End the requests whose deadline has passed, in whatever state they are."""
        for frontend, request_id in self._open_requests.deadlines.passed(self._clock()):
            self._delivery.end(frontend, request_id, Finish.EXPIRED)
            self._remove_ended(frontend, request_id, Finish.EXPIRED)

    def next_due_s(self, at_most_s: float) -> float:
        """Seconds until the next deadline, or at_most_s if that is sooner."""
        return self._open_requests.deadlines.next_due_s(self._clock(), at_most_s)
