"""A place for one file descriptor that outlives the processes that leave and find it.

It is a message that nobody takes out of a socket pair: the kernel keeps the message, and the descriptor in it, as long
as any process has the pair open. Finders look at the message and get a descriptor of their own.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MESSAGE = b"fd"


class FdMailbox:
    """One of any number of users in several processes. All of them are trusted with the content."""

    def __init__(self, inlet: socket.socket, outlet: socket.socket) -> None:
        self._inlet, self._outlet = inlet, outlet

    @classmethod
    def create(cls) -> FdMailbox:
        return cls(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    @classmethod
    def attach(cls, fds: tuple[int, int]) -> FdMailbox:
        """Open a mailbox by its inherited fds, which stay the caller's. Raises OSError for fds of anything else."""
        for fd in fds:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise OSError(errno.ENOTSOCK, f"fd {fd} is no socket")
        inlet, outlet = (socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_SEQPACKET) for fd in fds)
        return cls(inlet, outlet)

    @property
    def fds(self) -> tuple[int, int]:
        """A child that inherits them opens the mailbox with them."""
        return self._inlet.fileno(), self._outlet.fileno()

    def find(self) -> int | None:
        """A new fd of what was left last, which the caller closes, or None."""
        return self._receive(socket.MSG_PEEK)

    def leave(self, fd: int) -> None:
        """Replace the content by fd, which stays the caller's too."""
        self.clear()
        socket.send_fds(self._inlet, [_MESSAGE], [fd])

    def clear(self) -> None:
        """Other processes keep what they have found."""
        while (fd := self._receive(0)) is not None:
            os.close(fd)

    def holds(self, fd: int) -> bool:
        """Whether the content is the same file as fd."""
        found = self.find()
        if found is None:
            return False
        try:
            return os.path.samestat(os.fstat(found), os.fstat(fd))
        finally:
            os.close(found)

    @property
    def is_empty(self) -> bool:
        found = self.find()
        if found is None:
            return True
        os.close(found)
        return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes, not other threads, from entering. A process that dies leaves."""
        # A lock of fcntl belongs to the process; one of flock would belong to all that have inherited the sockets.
        fcntl.lockf(self._outlet, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._outlet, fcntl.LOCK_UN)

    def close(self) -> None:
        """The content is freed when the last process has closed it, or has ended."""
        self._inlet.close()
        self._outlet.close()

    def _receive(self, flags: int) -> int | None:
        fds = array.array("i")
        try:
            # Not socket.recv_fds: in Python 3.11 it ignores the flags.
            _, ancillary, _, _ = self._outlet.recvmsg(
                len(_MESSAGE), socket.CMSG_LEN(fds.itemsize), flags | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return fds[0] if fds else None
