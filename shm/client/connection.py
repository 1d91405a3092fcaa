"""Connect to the backend, notice its death, connect again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.process.private_directory import UnsafeDirectory
from penstock.shm.buffers.device_api import DeviceError, OpenDevice
from penstock.shm.client.session import Session
from penstock.shm.link.frontend_link import LinkBroken
from penstock.shm.link.join import Refused
from penstock.shm.memory.ledger import Ledger
from penstock.shm.memory.region import RegionError
from penstock.shm.messages import BufferKind, BufferRequest, ModelCard, StepOutputs, WireError

logger = logging.getLogger("penstock.client")

_RECONNECT_S = 0.05
_REFUSED_S = 1.0
_TURN_S = 0.003
"""How long messages may hold the event loop in one turn."""
_LAST_WORDS_S = 0.02
"""Time for a dead backend's last messages, which ZeroMQ's thread may not have delivered yet."""


@dataclass(frozen=True, slots=True)
class ConnectionEvents:
    """Callbacks, called in this order: one accept and one attach, any number of outputs and sends, one detach."""

    accept: Callable[[ModelCard], None]
    """Raises Refused for a backend that is not ours. Then nothing else is called."""
    attach: Callable[[Session], None]
    outputs: Callable[[Session, StepOutputs], Iterator[None]]
    """Handles a message in slices. Raises LinkBroken and ValueError to end the session."""
    send: Callable[[], None]
    """The link may take messages again."""
    detach: Callable[[], None]
    """The backend is gone; the session closes next."""
    wants_last_words: Callable[[], bool]
    """Whether to wait for the last messages of a backend that has died."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Callbacks of a client to the set of replicas that it belongs to."""

    accept: Callable[[ModelCard], None] = lambda _card: None
    """Raises Refused for a backend that is no replica of the others."""
    lost: Callable[[], None] = lambda: None
    """The backend has died. The set may take open streams away."""
    has_others: Callable[[], bool] = lambda: False
    """Whether another replica is ready to continue streams."""


class BackendConnection:
    """One session at a time with whichever backend listens at the socket. Two fds drive it; it does not poll."""

    def __init__(
        self,
        socket_path: Path,
        ledger: Ledger,
        buffer_request: BufferRequest | None,
        open_device: OpenDevice | None,
        events: ConnectionEvents,
    ) -> None:
        self._socket_path = socket_path
        self._ledger = ledger
        self._buffer_request = buffer_request
        self._open_device = open_device
        self._events = events
        self._is_alive = False
        self._session_over = asyncio.Event()
        self._unhandled: Iterator[None] = iter(())
        """The rest of the session's last message."""
        self._continues = False
        """`_continue` is scheduled."""
        self._is_broken = False
        """The session's messages contradict what was sent."""
        self._connector: asyncio.Task[None] | None = None
        self._reported = ""
        self.session: Session | None = None
        """Between attach and detach, even if its backend has died."""

    @property
    def live_session(self) -> Session | None:
        """The session, unless its backend is known to be dead. Send only to this one."""
        return self.session if self._is_alive else None

    @property
    def is_started(self) -> bool:
        return self._connector is not None

    def start(self) -> None:
        """Idempotent. Call in the event loop."""
        if self._connector is None:
            self._connector = asyncio.create_task(self._connect_forever(), name="backend-client")
            self._connector.add_done_callback(_report_end)

    async def close(self) -> None:
        """Idempotent; detaches."""
        if self._connector is not None:
            self._connector.cancel()
            await asyncio.gather(self._connector, return_exceptions=True)
            self._connector = None

    async def _connect_forever(self) -> None:
        while True:
            pause_s = _RECONNECT_S
            try:
                session = await self._open()
            except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BlockingIOError):
                pass  # no backend yet, or its backlog is full
            except DeviceError as error:
                pause_s = self._fall_back_to_host(error)
            except (OSError, Refused, UnsafeDirectory, WireError, RegionError) as error:
                self._report(error)
                pause_s = _REFUSED_S
            else:
                self._reported = ""
                try:
                    self._attach(session)
                    await self._session_over.wait()
                finally:
                    self._detach(session)
            await asyncio.sleep(pause_s)

    async def _open(self) -> Session:
        session = await Session.open(self._socket_path, self._ledger, self._buffer_request, self._open_device)
        try:
            self._events.accept(session.model)
        except Refused:
            session.close()
            raise
        return session

    def _report(self, error: Exception) -> None:
        """Log why there is no session; the same reason only once in a row."""
        if self._reported != str(error):
            self._reported = str(error)
            logger.warning(
                "cannot use the backend at %s: %s; trying again every %g s", self._socket_path, error, _REFUSED_S
            )

    def _fall_back_to_host(self, error: DeviceError) -> float:
        """This process cannot use the backend's GPU. Ask for buffers on the host, if the caller accepts them.

        Returns the seconds until the next attempt.
        """
        if self._buffer_request is not None and BufferKind.HOST in self._buffer_request.kinds:
            logger.warning("shared buffers on the GPU cannot be opened: %s; using buffers on the host", error)
            self._buffer_request = BufferRequest(
                self._buffer_request.num_buffers, self._buffer_request.num_bytes, (BufferKind.HOST,)
            )
            return _RECONNECT_S
        logger.warning("shared buffers on the GPU cannot be opened: %s; trying again in %g s", error, _REFUSED_S)
        return _REFUSED_S

    def _attach(self, session: Session) -> None:
        self.session = session
        self._session_over = asyncio.Event()
        self._unhandled, self._continues, self._is_broken = iter(()), False, False
        self._events.attach(session)
        self._is_alive = True
        loop = asyncio.get_running_loop()
        loop.add_reader(session.control_fd, self._on_control, session)
        loop.add_reader(session.link_fd, self._on_link, session)
        self._on_link(session)

    def _detach(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(session.control_fd)
        loop.remove_reader(session.link_fd)
        self._handle(session, math.inf)
        self.session = None
        self._is_alive = False
        self._events.detach()
        session.close()

    def _on_control(self, session: Session) -> None:
        if session is self.session and session.control_ended():
            self._is_alive = False
            loop = asyncio.get_running_loop()
            loop.remove_reader(session.control_fd)
            loop.call_later(_LAST_WORDS_S if self._events.wants_last_words() else 0.0, self._session_over.set)

    def _on_link(self, session: Session) -> None:
        """Handle messages for a few milliseconds, and leave the rest to the loop's next turn."""
        if session is not self.session or self._session_over.is_set() or self._continues:
            return
        if not self._handle(session, time.monotonic() + _TURN_S):
            self._continue_soon(session)
        if not self._is_broken:
            session.return_credits()
            self._events.send()

    def _handle(self, session: Session, until_s: float) -> bool:
        """Handle messages until a monotonic time. True when none is left. A broken session ends and counts as empty."""
        try:
            while not self._is_broken:
                for _ in self._unhandled:
                    if time.monotonic() >= until_s:
                        return False
                received = session.receive(1)
                if not received:
                    return True
                self._unhandled = self._events.outputs(session, received[0])
        except (LinkBroken, ValueError) as error:
            logger.error("the backend's messages are inconsistent: %s; reconnecting", error)
            self._is_alive = False
            self._is_broken = True
            self._session_over.set()
        return True

    def _continue_soon(self, session: Session) -> None:
        if not self._continues:
            self._continues = True
            asyncio.get_running_loop().call_soon(self._continue, session)

    def _continue(self, session: Session) -> None:
        if session is self.session:
            self._continues = False
            self._on_link(session)

    def receive_soon(self, session: Session) -> None:
        """Call after sending: a send can consume the wake-up of the link's fd."""
        if session.needs_drain:
            self._continue_soon(session)


def _report_end(connector: asyncio.Task[None]) -> None:
    """Log an exception of the connector, which should only end by cancellation: a bug of ours."""
    if not connector.cancelled() and (error := connector.exception()) is not None:
        logger.critical("the backend client stopped because of a bug; it will not reconnect", exc_info=error)
