"""The frontend's side of the rendezvous: say Hello, receive the memory that the backend hands over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from penstock.process.private_directory import Trust, opened_directory, path_in
from penstock.shm.link.rendezvous import peer_credentials
from penstock.shm.messages import (
    MAX_WELCOME_BYTES,
    PROTOCOL_VERSION,
    BufferKind,
    BufferRequest,
    Hello,
    Refusal,
    Welcome,
    WireError,
    decode_welcome,
    encode,
)

_MAX_FDS = 6
"""One more than any welcome has, so that a surplus fd is noticed."""


class Refused(Exception):
    """The backend answered the handshake with a reason instead of a welcome."""


@dataclass(slots=True)
class Invitation:
    """The backend's answer to a Hello. The receiver owns the control socket and the fds."""

    control: socket.socket
    welcome: Welcome
    message_socket_fd: int
    """O_PATH; it reaches the backend's message socket, which has no name."""
    arena_fd: int
    backend_board_fd: int
    frontend_board_fd: int
    buffer_fds: tuple[int, ...] = ()
    """One fd if the welcome grants buffers on the host."""

    def close_fds(self) -> None:
        for fd in (
            self.message_socket_fd,
            self.arena_fd,
            self.backend_board_fd,
            self.frontend_board_fd,
            *self.buffer_fds,
        ):
            os.close(fd)


async def join(socket_path: Path, buffer_request: BufferRequest | None = None) -> Invitation:
    """Shake hands. Waits while the backend is busy; its death ends the wait.

    Nothing is sent to another user's process, and no directory is entered that another user could change.

    Raises OSError when no backend listens, UnsafeDirectory, Refused with the reason, WireError for an invalid answer.
    """
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with opened_directory(socket_path.parent, Trust.PRIVATE, create=False) as directory_fd:
            control.connect(path_in(directory_fd, socket_path.name))
        pid, uid = peer_credentials(control)
        if uid != os.geteuid():
            raise Refused(f"the process that listens there (pid {pid}) belongs to user {uid}, not {os.geteuid()}")
        with contextlib.suppress(BrokenPipeError):  # refused at once: the reason can still be read
            control.send(encode(Hello(PROTOCOL_VERSION, buffer_request)))
        await _readable(control)
        data, fds, flags, _ = socket.recv_fds(control, MAX_WELCOME_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the backend went away during the handshake")
            answer = decode_welcome(data)
            if isinstance(answer, Refusal):
                raise Refused(answer.reason)
            grant = answer.buffers
            num_fds = 5 if grant is not None and grant.kind is BufferKind.HOST else 4
            if len(fds) != num_fds or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError(f"a welcome with {len(fds)} file descriptors, expected {num_fds}")
            if (grant is None) is not (buffer_request is None):
                raise WireError("the welcome and the Hello disagree about shared buffers")
            if not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
                raise WireError("a welcome whose first file descriptor is not a socket")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        message_socket_fd, arena_fd, backend_board_fd, frontend_board_fd, *buffer_fds = fds
        return Invitation(
            control, answer, message_socket_fd, arena_fd, backend_board_fd, frontend_board_fd, tuple(buffer_fds)
        )
    except BaseException:
        control.close()
        raise


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection.fileno())
