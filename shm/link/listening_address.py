"""The backend's address: a socket in a private directory, a lock file beside it, and a message socket without name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

from penstock.process.private_directory import Trust, UnsafeDirectory, open_directory, path_in, private_umask

MAX_PATH_BYTES = 107
"""Linux's limit for the path of a Unix socket."""
MAX_NAME_BYTES = MAX_PATH_BYTES - len("/proc/self/fd/2147483647/..messages")
"""Limit of the path's last part. Sockets are bound and connected through the directory's fd, one of them
with a suffix."""

LOCK_SUFFIX = ".lock"
NEXT = "-next"
"""At the end of the name of a successor's socket, until `take_over`."""
_BACKLOG = 128
_MAX_PID_BYTES = 20


class CannotListen(Exception):
    """The socket cannot be used. The message is one line for the operator."""


class AddressInUse(CannotListen):
    """Another live backend holds this socket."""


class ListeningAddress:
    """A path that this process alone listens on, until `close` or its death.

    Every access goes through an fd of the path's directory. That directory and all above it have been checked: only
    this user and root can change them.
    """

    def __init__(self, path: Path) -> None:
        """Make the directory and lock the path. Raises CannotListen."""
        num_bytes = len(os.fsencode(path))
        if num_bytes > MAX_PATH_BYTES:
            raise CannotListen(f"the socket path {path} has {num_bytes} bytes; the limit is {MAX_PATH_BYTES}")
        num_bytes = len(os.fsencode(path.name))
        if num_bytes > MAX_NAME_BYTES:
            raise CannotListen(f"the socket's name {path.name} has {num_bytes} bytes; the limit is {MAX_NAME_BYTES}")
        self._name = path.name
        self._inode = 0
        """Of the socket that `listen` made."""
        self._directory = path.parent
        with ExitStack() as opened:
            try:
                self._directory_fd = open_directory(path.parent, Trust.PRIVATE)
            except UnsafeDirectory as error:
                raise CannotListen(str(error)) from None
            except OSError as error:
                raise CannotListen(f"cannot create or enter {path.parent}: {error.strerror}") from None
            opened.callback(os.close, self._directory_fd)
            self._check_name(path)
            opened.callback(os.close, self._lock(path))
            self._opened = opened.pop_all()

    def _check_name(self, path: Path) -> None:
        """Raises CannotListen for anything but a socket: the path comes from an option, and `listen` removes what lies
        there."""
        try:
            mode = os.stat(self._name, dir_fd=self._directory_fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise CannotListen(f"cannot look at {path}: {error.strerror}") from None
        if not stat.S_ISSOCK(mode):
            raise CannotListen(f"{path} exists and is not a socket")

    def _lock(self, path: Path) -> int:
        """Lock the file beside the path. Returns its fd, which holds the lock until it is closed."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with ExitStack() as opened:
            try:
                fd = os.open(self._name + LOCK_SUFFIX, flags, 0o600, dir_fd=self._directory_fd)
                opened.callback(os.close, fd)
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise CannotListen(f"{path}.lock exists and is not a file")
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            except BlockingIOError:  # of flock; the others do not block
                holder = os.pread(fd, _MAX_PID_BYTES, 0).decode("ascii", "replace")
                raise AddressInUse(f"another backend (pid {holder or 'unknown'}) serves {path}") from None
            except OSError as error:
                raise CannotListen(f"cannot create or lock {path}.lock: {error.strerror}") from None
            opened.pop_all()
        return fd

    def listen(self, listener: socket.socket) -> None:
        """Let the socket listen at the path. Raises CannotListen."""
        try:
            self._unlink(self._name)  # this process holds the lock, so an existing socket is a dead backend's
            self._bind(listener, self._name)
            self._inode = os.stat(self._name, dir_fd=self._directory_fd, follow_symlinks=False).st_ino
            listener.listen(_BACKLOG)
        except OSError as error:
            raise self._cannot_make_socket(error) from None

    def unlink(self) -> None:
        """Remove the socket that `listen` made, also if it has taken another's path over; unless another backend has
        taken over this one's. Raises OSError."""
        stem, dot, suffix = self._name.rpartition(".")
        for name in {self._name, stem.removesuffix(NEXT) + dot + suffix}:
            with contextlib.suppress(FileNotFoundError):
                # The socket holds its inode, so no other file has that number.
                if os.stat(name, dir_fd=self._directory_fd, follow_symlinks=False).st_ino == self._inode:
                    self._unlink(name)

    def unnamed_listener(self) -> tuple[socket.socket, int]:
        """Return a stream socket that listens and has no name, and an fd (O_PATH) for `connectable_path`.

        Only a process that has that fd can connect. The name is removed before the socket listens, so no other process
        can connect by it at any moment. The caller closes both. Raises CannotListen.
        """
        name = f".{self._name}.messages"
        try:
            with ExitStack() as opened:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                opened.callback(listener.close)
                self._unlink(name)  # a backend that was killed in the lines below has left it
                self._bind(listener, name)
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory_fd)
                opened.callback(os.close, fd)
                self._unlink(name)
                listener.listen(_BACKLOG)
                opened.pop_all()
        except OSError as error:
            raise self._cannot_make_socket(error) from None
        return listener, fd

    def _bind(self, listener: socket.socket, name: str) -> None:
        with private_umask():
            listener.bind(path_in(self._directory_fd, name))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # then there is nothing to remove
            os.unlink(name, dir_fd=self._directory_fd)

    def _cannot_make_socket(self, error: OSError) -> CannotListen:
        return CannotListen(f"cannot make a socket in {self._directory}: {error.strerror}")

    def close(self) -> None:
        """Release the lock. Call `unlink` before, if `listen` made a socket."""
        self._opened.close()


def connectable_path(socket_fd: int) -> str:
    """A path that connects to the socket whose O_PATH fd this process holds. Valid until the fd is closed."""
    return f"/proc/self/fd/{socket_fd}"


def successor_path(path: Path) -> Path:
    """Return the path at which the successor of the backend at this path listens before it takes over."""
    return path.with_name(f"{path.stem}{NEXT}{path.suffix}")


def take_over(path: Path, new_path: Path) -> None:
    """Give the path to the backend that listens at new_path, its `successor_path`.

    New connections reach that backend; existing connections stay. Raises OSError.
    """
    os.rename(new_path, path)
    os.rename(new_path.with_name(new_path.name + LOCK_SUFFIX), path.with_name(path.name + LOCK_SUFFIX))


def holder_pid(path: Path) -> int | None:
    """The pid of the backend that the path belongs to, dead or alive; None if there was none.

    The path may belong to another backend a moment later.
    """
    try:
        return int(path.with_name(path.name + LOCK_SUFFIX).read_bytes()[:_MAX_PID_BYTES] or 0) or None
    except (OSError, ValueError):
        return None


def check_free(path: Path) -> None:
    """Raises CannotListen if a backend serves this socket. Call it before long work, such as loading weights."""
    ListeningAddress(path).close()
