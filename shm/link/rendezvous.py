"""Where frontends and the backend meet: a unix socket over which versions are checked and memory is handed over.

After the handshake the connection carries nothing more. It stays open for as long as both live, and its end is the
death notice: the kernel closes it whatever a process dies of. This side never blocks and trusts no peer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.shm.messages import (
    PROTOCOL_VERSION,
    BuffersClosed,
    Hello,
    Refusal,
    WireError,
    decode_hello,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.shm.messages import Welcome

MAX_PATH_BYTES = 107 - len(".zmq")
"""A unix socket's path has 107 bytes at most; the message socket stands beside this one under a longer name."""

_MAX_HELLO_BYTES = 64
_UCRED = struct.Struct("3i")
_ACCEPT_PAUSE_S = 0.1
_BUFFERS_CLOSED = encode(BuffersClosed())


class CannotListen(Exception):
    """The socket cannot be had. The message is one line for the operator."""


class AddressInUse(CannotListen):
    """Another live backend holds this socket."""


class UnsafeDirectory(CannotListen):
    """The socket's directory or path cannot be used, or not safely."""


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Whatever is created inside is for this user only. The umask is the process's: keep it short."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def _private_directory(directory: Path) -> None:
    try:
        with private_umask():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise UnsafeDirectory(f"{directory} cannot be made or entered: {error.strerror}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UnsafeDirectory(
            f"{directory} has mode {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}; "
            f"it must have mode 700 and owner {os.geteuid()}"
        )


def _remove_socket(path: Path) -> None:
    """Never anything else than a socket: the path comes from an option."""
    if path.is_socket():
        path.unlink()
    elif path.exists():
        raise UnsafeDirectory(f"{path} exists and is not a socket")


def _lock(path: Path) -> int:
    """The fd of the lock file, held until it is closed or the process dies."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnsafeDirectory(f"{path} cannot be made: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace")
        os.close(fd)
        raise AddressInUse(f"another backend (pid {holder or 'unknown'}) serves {path.with_suffix('')}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def check_free(socket_path: Path) -> None:
    """Raises CannotListen where a backend serves this socket now: to be asked before long work, such as loading."""
    _check_path(socket_path)
    os.close(_lock(_lock_path(socket_path)))


def _check_path(socket_path: Path) -> None:
    if len(os.fsencode(socket_path)) > MAX_PATH_BYTES:
        raise UnsafeDirectory(f"{socket_path} is longer than {MAX_PATH_BYTES} bytes")
    _private_directory(socket_path.parent)
    if socket_path.exists() and not socket_path.is_socket():
        raise UnsafeDirectory(f"{socket_path} exists and is not a socket")


def _lock_path(socket_path: Path) -> Path:
    return socket_path.with_name(socket_path.name + ".lock")


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that made the other end, told by the kernel."""
    pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


@dataclass(slots=True, eq=False)
class ControlConnection:
    """One frontend's control socket. deadline_s (monotonic) is when a handshake must be over; None once it is."""

    socket: socket.socket
    pid: int
    deadline_s: float | None
    hello: Hello | None = None
    has_closed_buffers: bool = False
    """Its last word was that it has none of our device memory open."""


class Rendezvous:
    """The backend's side. Readable (`fileno`) whenever `turn` has something to do."""

    def __init__(self, socket_path: Path, *, max_connections: int = 128, handshake_timeout_s: float = 3.0) -> None:
        """Raises AddressInUse, UnsafeDirectory."""
        self._path = socket_path
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._connections: dict[int, ControlConnection] = {}
        self._accept_again_s: float | None = None
        self.refused = 0
        """Connections turned away: too many, another user's, no proper Hello, no Hello in time, no memory."""
        _check_path(socket_path)
        self._lock_fd = _lock(_lock_path(socket_path))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._epoll = select.epoll()
        try:
            # Under the lock a socket that is there can only be a dead backend's.
            _remove_socket(socket_path)
            with private_umask():
                self._listener.bind(str(socket_path))
            self._listener.listen(128)
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        except BaseException:
            self._release()
            raise

    def fileno(self) -> int:
        return self._epoll.fileno()

    def deadline_s(self) -> float | None:
        """The monotonic time at which `turn` is due even though nothing is readable."""
        times = [c.deadline_s for c in self._connections.values() if c.deadline_s is not None]
        if self._accept_again_s is not None:
            times.append(self._accept_again_s)
        return min(times, default=None)

    def turn(self) -> tuple[list[ControlConnection], list[ControlConnection]]:
        """Accepts, reads, expires. Returns (those that have said Hello and await `welcome`, those that have died)."""
        arrived: list[ControlConnection] = []
        died: list[ControlConnection] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                if connection.deadline_s is None:
                    # A frontend has no more to say here after its Hello than BuffersClosed: the connection is over.
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
                    # Out of fds: the listener stays readable, so look away for a while instead of spinning.
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
        """Whether the connection has said a Hello that we can answer with a welcome."""
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
        """Ends a handshake without a welcome; the frontend is told the reason and may come again later."""
        self.refused += 1
        with contextlib.suppress(OSError):  # the peer may have gone: then nobody waits for the reason
            connection.socket.send(encode(Refusal(reason)))
            # A Hello left unread would turn the close into a reset, which hides the reason.
            connection.socket.recv(_MAX_HELLO_BYTES)
        self.drop(connection)

    def welcome(self, connection: ControlConnection, welcome: Welcome, fds: Sequence[int]) -> bool:
        """Ends the handshake. False when the peer has gone meanwhile; the connection is dropped then."""
        try:
            socket.send_fds(connection.socket, [encode(welcome)], list(fds))
        except OSError:
            self.drop(connection)
            return False
        connection.deadline_s = None
        return True

    def drop(self, connection: ControlConnection) -> None:
        """Closes a connection, which the frontend takes for our death; idempotent."""
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._epoll.unregister(connection.socket.fileno())
            connection.socket.close()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self.drop(connection)
        self._path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        self._epoll.close()
        self._listener.close()
        os.close(self._lock_fd)


def _last_word(connection: ControlConnection) -> bytes:
    """What a connection that is over has still to say; nothing where it was reset."""
    try:
        return connection.socket.recv(_MAX_HELLO_BYTES)
    except OSError:
        return b""
