"""The frontends that are connected to a backend: their arrival, their memory, their numbers and their end."""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass

import msgspec

from penstock.shm.buffers.buffer_export import BufferExporter, BufferRequestRefused, ExportedBuffers
from penstock.shm.link.connected_frontend import ConnectedFrontend
from penstock.shm.link.rendezvous import ControlConnection, Rendezvous
from penstock.shm.memory.board import BackendBoard, FrontendTotals
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import Adapter, ModelCard, Welcome


@dataclass(slots=True)
class LinkCounters:
    """Counts that only grow."""

    messages_in: int = 0
    messages_out: int = 0
    events_out: int = 0
    strangers: int = 0
    """Messages from senders that are not frontends of this backend, or were disconnected."""
    faults: int = 0
    """Malformed messages and descriptors, which were dropped or rejected."""
    blocked_sends: int = 0
    """Sends that ZeroMQ refused although there was credit: a bug of ours."""
    unreachable: int = 0
    """Sends to frontends whose connection had ended before the backend noticed their death."""
    stalled: int = 0
    """Frontends disconnected because they returned no credit in time."""
    expelled: int = 0
    """Frontends disconnected because of their faults."""


logger = logging.getLogger("penstock.link")

_TOTALS_EVERY_S = 0.25


class FrontendTable:
    """Welcomes frontends that arrive at the rendezvous, and takes their memory back when they end."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        message_socket_fd: int,
        card: ModelCard,
        board: BackendBoard,
        ledger: Ledger,
        *,
        credit: int,
        exporter: BufferExporter | None,
    ) -> None:
        """All arguments stay the caller's. message_socket_fd (O_PATH) reaches the socket that receives messages."""
        self._rendezvous = rendezvous
        self._message_socket_fd = message_socket_fd
        self._card = card
        self._board = board
        self._ledger = ledger
        self._credit = credit
        self._exporter = exporter
        self._totals = FrontendTotals()
        self._totals_due_s = 0.0
        self._next_epoch = secrets.randbits(62)
        self.by_epoch: dict[int, ConnectedFrontend] = {}
        self.by_identity: dict[bytes, ConnectedFrontend] = {}

    def turn(self) -> list[ConnectedFrontend]:
        """Welcome frontends that have arrived. Returns those that have died, still in the table; never blocks."""
        arrived, ended = self._rendezvous.turn()
        died = [frontend for connection in arrived if (frontend := self._welcome(connection)) is not None]
        died += [frontend for frontend in self.by_epoch.values() if frontend.connection in ended]
        if self._exporter is not None:
            self._exporter.reap()
        return died

    def _welcome(self, connection: ControlConnection) -> ConnectedFrontend | None:
        """Returns the frontend if it has died before it could be welcomed."""
        epoch = self._next_epoch
        self._next_epoch += 1
        try:
            buffers = self._export_buffers(connection)
        except BufferRequestRefused as refusal:
            self._rendezvous.refuse(connection, str(refusal))
            return None
        try:
            frontend = ConnectedFrontend(epoch, connection, self._card, self._credit, buffers)
        except OSError as error:
            self._release_buffers(buffers, has_closed=True)
            # It may come again; the frontends that are here stay.
            logger.warning("refused a frontend (pid %d): no memory or file descriptors: %s", connection.pid, error)
            self._rendezvous.refuse(connection, "the backend has no memory or file descriptors for another frontend")
            return None
        self.by_epoch[epoch] = self.by_identity[frontend.identity] = frontend
        self._ledger.acquire("frontend", epoch, connection.pid)
        welcome = Welcome(
            epoch=epoch,
            identity=frontend.identity,
            backend_pid=os.getpid(),
            arena_slots=frontend.arena_slots,
            arena_slot_bytes=frontend.arena_slot_bytes,
            credit=self._credit,
            model=self._card,
            buffers=buffers.grant if buffers is not None else None,
        )
        fds = [self._message_socket_fd, frontend.arena_fd, self._board.fd, frontend.board_fd]
        fds += buffers.fds if buffers is not None else ()
        if not self._rendezvous.welcome(connection, welcome, fds):
            return frontend
        frontend.close_fds()
        return None

    def _export_buffers(self, connection: ControlConnection) -> ExportedBuffers | None:
        """Raises BufferRequestRefused."""
        buffer_request = connection.hello.buffers if connection.hello is not None else None
        if buffer_request is None:
            return None
        if self._exporter is None:
            raise BufferRequestRefused("this backend shares no buffers")
        return self._exporter.export(buffer_request, connection.pid)

    def _release_buffers(self, buffers: ExportedBuffers | None, *, has_closed: bool) -> None:
        if buffers is not None and self._exporter is not None:
            self._exporter.release_client(buffers, has_closed=has_closed)

    def announce_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Note the model's adapters for all frontends, and for those that come."""
        self._card = msgspec.structs.replace(self._card, adapters=adapters)
        for frontend in self.by_epoch.values():
            frontend.add_adapters(adapters)

    def remove(self, frontend: ConnectedFrontend) -> None:
        """Disconnect a frontend and free its memory. Call once per frontend."""
        del self.by_epoch[frontend.epoch]
        del self.by_identity[frontend.identity]
        self._rendezvous.drop(frontend.connection)
        self._release_buffers(frontend.buffers, has_closed=frontend.connection.has_closed_buffers)
        self._totals.retire(frontend.board)
        frontend.close()
        self._ledger.release("frontend", frontend.epoch)

    def show_totals(self) -> None:
        """Add up the frontends' boards on the backend's, a few times a second."""
        now_s = time.monotonic()
        if now_s >= self._totals_due_s:
            self._totals_due_s = now_s + _TOTALS_EVERY_S
            sums = self._totals.sums(frontend.board for frontend in self.by_epoch.values())
            self._board.show_totals(len(self.by_epoch), sums)
