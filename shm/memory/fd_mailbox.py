"""A place for file descriptors, which outlives the processes that leave and find them.

They are in a message that stays in a socket pair: the kernel keeps the message, and the descriptors in it, as long as
any process has the pair open. Finders look at the message without taking it, and get descriptors of their own.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, Sequence

_MESSAGE = b"fd"
MAX_FDS = 64
"""The kernel's limit is 253."""


class FdMailbox:
    """One user's end; there may be any number of users, in several processes. All of them are trusted with
    the content."""

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

    def duplicate(self) -> FdMailbox:
        """Open the same mailbox again."""
        return FdMailbox.attach(self.fds)

    @property
    def fds(self) -> tuple[int, int]:
        """The fds with which a child that inherits them opens the mailbox."""
        return self._inlet.fileno(), self._outlet.fileno()

    def find(self) -> tuple[int, ...]:
        """New fds of the latest content, which the caller closes; empty if there is none."""
        return self._receive(socket.MSG_PEEK)

    def leave(self, fds: Sequence[int]) -> None:
        """Replace the content by fds, which stay the caller's too. Raises OSError."""
        if not 1 <= len(fds) <= MAX_FDS:
            raise OSError(errno.EINVAL, f"{len(fds)} fds for a mailbox; it takes 1 to {MAX_FDS}")
        self.clear()
        socket.send_fds(self._inlet, [_MESSAGE], fds)

    def clear(self) -> None:
        """Empty the mailbox. Other processes keep what they have found."""
        while fds := self._receive(0):
            close_all(fds)

    def holds(self, fd: int) -> bool:
        """Whether the first fd of the content is the same file as fd."""
        found = self.find()
        try:
            return bool(found) and os.path.samestat(os.fstat(found[0]), os.fstat(fd))
        finally:
            close_all(found)

    @property
    def is_empty(self) -> bool:
        found = self.find()
        close_all(found)
        return not found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes, but not other threads, from entering the block. A process that dies
        releases the lock."""
        # An fcntl lock belongs to the process; a flock lock would belong to all that inherited the sockets.
        fcntl.lockf(self._outlet, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._outlet, fcntl.LOCK_UN)

    def close(self) -> None:
        """The content is freed when the last process has closed it, or has ended."""
        self._inlet.close()
        self._outlet.close()

    def _receive(self, flags: int) -> tuple[int, ...]:
        fds = array.array("i")
        try:
            # Not socket.recv_fds: in Python 3.11 it ignores the flags.
            _, ancillary, _, _ = self._outlet.recvmsg(
                len(_MESSAGE),
                socket.CMSG_LEN(MAX_FDS * fds.itemsize),
                flags | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return ()
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return tuple(fds)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
