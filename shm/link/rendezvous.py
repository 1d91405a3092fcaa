"""The unix socket at which frontends meet the backend: it checks versions and hands over memory.

After the handshake the connection carries nothing more. It stays open while both processes live, and its end is the
death notice: the kernel closes it however a process dies. This side never blocks and trusts no peer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.shm.link.listening_address import ListeningAddress
from penstock.shm.messages import (
    PROTOCOL_VERSION,
    BuffersClosed,
    Hello,
    Refusal,
    Welcome,
    WireError,
    decode_hello,
    encode,
)

_MAX_HELLO_BYTES = 64
_UCRED = struct.Struct("3i")
_ACCEPT_PAUSE_S = 0.1
_BUFFERS_CLOSED = encode(BuffersClosed())


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel."""
    pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


@dataclass(slots=True, eq=False)
class ControlConnection:
    """One frontend's control socket. deadline_s (monotonic) is the end of the handshake; None when it is complete."""

    socket: socket.socket
    pid: int
    deadline_s: float | None
    hello: Hello | None = None
    has_closed_buffers: bool = False
    """It has reported that it closed all of the backend's device memory."""


class Rendezvous:
    """The backend's side. `fileno` is readable when `turn` has something to do."""

    def __init__(self, socket_path: Path, *, max_connections: int = 128, handshake_timeout_s: float = 3.0) -> None:
        """Raises CannotListen."""
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._connections: dict[int, ControlConnection] = {}
        self._accept_again_s: float | None = None
        self.refused = 0
        """Refused connections: too many, another user, no valid Hello, no Hello in time, no memory."""
        self.address = ListeningAddress(socket_path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._epoll = select.epoll()
        try:
            self.address.listen(self._listener)
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        except BaseException:
            self._release()
            raise

    def fileno(self) -> int:
        return self._epoll.fileno()

    def deadline_s(self) -> float | None:
        """Monotonic time at which `turn` is due even if nothing is readable."""
        times = [c.deadline_s for c in self._connections.values() if c.deadline_s is not None]
        if self._accept_again_s is not None:
            times.append(self._accept_again_s)
        return min(times, default=None)

    def turn(self) -> tuple[list[ControlConnection], list[ControlConnection]]:
        """Accept, read, expire. Returns (connections that sent a Hello and await `welcome`, connections that ended)."""
        arrived: list[ControlConnection] = []
        died: list[ControlConnection] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                if connection.deadline_s is None:
                    # After the Hello a frontend sends at most BuffersClosed, so the connection has ended.
                    connection.has_closed_buffers = _last_word(connection) == _BUFFERS_CLOSED
                    self.drop(connection)
                    died.append(connection)
                elif self._hello(connection):
                    arrived.append(connection)
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.deadline_s is not None and connection.deadline_s <= now_s and connection not in arrived:
                self.refuse(connection, "no Hello in time")
        if self._accept_again_s is not None and self._accept_again_s <= now_s:
            self._accept_again_s = None
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)
        return arrived, died

    def _accept(self) -> None:
        for _ in range(self._max_connections):
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # Out of fds. The listener stays readable: ignore it for a while instead of spinning.
                    self._epoll.modify(self._listener.fileno(), 0)
                    self._accept_again_s = time.monotonic() + _ACCEPT_PAUSE_S
                    return
                if error.errno == errno.ECONNABORTED:
                    continue
                raise
            accepted.setblocking(False)
            pid, uid = peer_credentials(accepted)
            connection = ControlConnection(accepted, pid, time.monotonic() + self._handshake_timeout_s)
            self._connections[accepted.fileno()] = connection
            self._epoll.register(accepted.fileno(), select.EPOLLIN)
            if uid != os.geteuid():
                self.refuse(connection, "this backend belongs to another user")
            elif len(self._connections) > self._max_connections:
                self.refuse(connection, f"{self._max_connections} frontends are connected already")

    def _hello(self, connection: ControlConnection) -> bool:
        """Whether the connection has sent a Hello to answer with a welcome."""
        try:
            data, _, flags, _ = connection.socket.recvmsg(_MAX_HELLO_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data, flags = b"", 0
        try:
            if not data or flags & socket.MSG_TRUNC:
                raise WireError("no Hello")
            hello = decode_hello(data)
        except WireError:
            self.refuse(connection, "not a Hello")
            return False
        if hello.protocol_version != PROTOCOL_VERSION:
            ours, theirs = PROTOCOL_VERSION, hello.protocol_version
            self.refuse(connection, f"the backend speaks protocol version {ours}, the frontend {theirs}")
            return False
        connection.hello = hello
        return True

    def refuse(self, connection: ControlConnection, reason: str) -> None:
        """End a handshake without a welcome. The frontend receives the reason and may come again."""
        self.refused += 1
        with contextlib.suppress(OSError):  # the peer may have disconnected
            connection.socket.send(encode(Refusal(reason)))
            # Closing with an unread Hello would reset the connection and lose the reason.
            connection.socket.recv(_MAX_HELLO_BYTES)
        self.drop(connection)

    def welcome(self, connection: ControlConnection, welcome: Welcome, fds: Sequence[int]) -> bool:
        """Complete the handshake. False if the peer has disconnected; then the connection is dropped."""
        try:
            socket.send_fds(connection.socket, [encode(welcome)], list(fds))
        except OSError:
            self.drop(connection)
            return False
        connection.deadline_s = None
        return True

    def drop(self, connection: ControlConnection) -> None:
        """Close a connection; the frontend treats that as our death. Idempotent."""
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._epoll.unregister(connection.socket.fileno())
            connection.socket.close()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self.drop(connection)
        self.address.unlink()
        self._release()

    def _release(self) -> None:
        self._epoll.close()
        self._listener.close()
        self.address.close()


def _last_word(connection: ControlConnection) -> bytes:
    """The last message of a connection that has ended; empty if it was reset."""
    try:
        return connection.socket.recv(_MAX_HELLO_BYTES)
    except OSError:
        return b""
