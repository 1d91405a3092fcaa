"""A stand-in for the backend's link: every message is made, and none is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.shm.link.connected_frontend import ConnectedFrontend
from penstock.shm.messages import EventLogprobs, Failure, Finish, Started, encode

if TYPE_CHECKING:
    from penstock.shm.link.events import LinkEvent
    from penstock.shm.link.rendezvous import ControlConnection

NUM_FRONTENDS = 4
CONTEXT_TOKENS = 4096


class UnsentLink:
    """BackendLink without sockets: every message is made and none is sent."""

    def __init__(self) -> None:
        self.arrivals: list[LinkEvent] = []
        no_connection = cast("ControlConnection", None)
        self._peers = {
            epoch: ConnectedFrontend(epoch, no_connection, CONTEXT_TOKENS, 1) for epoch in range(NUM_FRONTENDS)
        }
        self._pending: dict[int, ConnectedFrontend] = {}

    def receive(self) -> list[LinkEvent]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def push(
        self,
        frontend: int,
        request_id: int,
        token_id: int,
        finish: Finish = Finish.NONE,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
    ) -> None:
        peer = self._pending[frontend] = self._peers[frontend]
        peer.add(request_id, token_id, finish, started, failure, logprobs)

    def note_preemption(self, frontend: int, request_id: int) -> None:
        self._peers[frontend].add_preemption(request_id)

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        peer = self._pending[frontend] = self._peers[frontend]
        peer.add_tokens(request_ids, token_ids)

    def flush(self) -> None:
        for peer in self._pending.values():
            encode(peer.next_outputs())
            peer.sent()
        self._pending.clear()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
