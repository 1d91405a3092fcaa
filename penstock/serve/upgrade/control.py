"""The socket on which a running `penstock serve` receives upgrades, and its client's side.

The client connects, sends the changed options as one message and then SIGUSR2. So the server's one thread, which sleeps
until a signal comes, needs to watch no socket. It answers with lines for the operator, and a status at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from penstock.process.private_directory import Trust, UnsafeDirectory, opened_directory, path_in
from penstock.serve.upgrade.new_options import BadOptions
from penstock.shm.link.listening_address import LOCK_SUFFIX, CannotListen, ListeningAddress
from penstock.shm.link.rendezvous import peer_credentials

SUFFIX = ".ctl"
_MAX_BYTES = 1 << 16


class CannotUpgrade(Exception):
    """The upgrade is impossible. The message is one line for the operator."""


class Report(Struct, frozen=True):
    """One line of progress, or the exit status of `penstock upgrade`, which is the last message."""

    line: str = ""
    status: int | None = None


class Caller:
    """The process that asked for an upgrade. It may be gone: then only the log has the lines."""

    def __init__(self, connection: socket.socket | None, log: Callable[[str], None]) -> None:
        """Takes the connection over; None for a signal without one."""
        self._connection = connection
        self._log = log

    def tell(self, line: str) -> None:
        self._log(line)
        self._send(Report(line))

    def end(self, status: int) -> None:
        self._send(Report(status=status))
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, report: Report) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(msgspec.json.encode(report))


class ControlSocket:
    """The server's side. `accept` never blocks."""

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        """Raises CannotListen."""
        self._log = log
        self._path = path
        self._address = ListeningAddress(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._address.listen(self._listener)
        except BaseException:
            self._listener.close()
            self._address.close()
            raise

    @classmethod
    def beside(cls, socket_path: Path, log: Callable[[str], None]) -> Self | None:
        """Listen beside the backend's socket. If that is impossible, log why and return None: the server works without
        upgrades."""
        try:
            return cls(socket_path.with_suffix(SUFFIX), log)
        except CannotListen as error:
            log(f"penstock upgrade cannot reach this server: {error}")
            return None

    def accept(self) -> tuple[Caller, list[str]]:
        """Return the next caller with the words that it sent; without one, a caller without a connection and no words.

        Raises BadOptions after it has told the caller what is wrong with its message.
        """
        connection = self._next_connection()
        caller = Caller(connection, self._log)
        if connection is None:
            return caller, []
        try:
            words = msgspec.json.decode(connection.recv(_MAX_BYTES), type=list[str])
        except (OSError, msgspec.DecodeError) as error:
            caller.tell(f"the upgrade cannot be read: {error}")
            caller.end(1)
            raise BadOptions(str(error)) from None
        return caller, words

    def _next_connection(self) -> socket.socket | None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # nobody is there: SIGUSR2 came from somebody else
            return None
        if peer_credentials(connection)[1] != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        self._address.unlink()
        self._path.with_name(self._path.name + LOCK_SUFFIX).unlink(missing_ok=True)
        self._listener.close()
        self._address.close()


def ask(path: Path, words: Sequence[str], show: Callable[[str], None]) -> int:
    """Ask the server at this control socket for an upgrade; return the exit status. Raises CannotUpgrade."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            with opened_directory(path.parent, Trust.PRIVATE, create=False) as directory_fd:
                connection.connect(path_in(directory_fd, path.name))
            pid, uid = peer_credentials(connection)
            if uid != os.geteuid():
                raise CannotUpgrade(f"the server at {path} (pid {pid}) belongs to user {uid}, not {os.geteuid()}")
            connection.send(msgspec.json.encode(list(words)))
            os.kill(pid, signal.SIGUSR2)
            while data := connection.recv(_MAX_BYTES):
                report = msgspec.json.decode(data, type=Report)
                if report.status is not None:
                    return report.status
                show(report.line)
        except (OSError, UnsafeDirectory) as error:
            raise CannotUpgrade(f"no server can be reached at {path}: {error}") from None
    raise CannotUpgrade("the server ended during the upgrade")
