"""The directories of servers' responses: one for each address that a server listens on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from penstock.frontend.endpoints.responses.background_places import HARD_BOUND_BYTES
from penstock.frontend.endpoints.responses.storage import owner
from penstock.frontend.endpoints.responses.storage.database import (
    CorruptFileError,
    Database,
    UnusableFileError,
    check_file,
)
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.responses")

NO_STATE = "none"
_FILE = "responses.sqlite3"
_PASSING = "passing-"
"""Prefix of directories of servers on a port that the system chose: they are removed when the server ends."""
_OWNER_FILE = "owner"


class StateError(Exception):
    """The state cannot be kept. The message is one line for the operator."""


def default_state_dir() -> str:
    """Return $XDG_STATE_HOME/penstock, by default ~/.local/state/penstock; none for a user without a home."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):
        return os.path.join(base, "penstock")
    try:
        return str(Path.home() / ".local" / "state" / "penstock")
    except RuntimeError:
        return NO_STATE


class StateFiles:
    """The directory of one server."""

    def __init__(self, state_dir: str, listening: socket.socket, *, is_passing: bool) -> None:
        """is_passing: nobody will look for the server at this address again."""
        self._base = Path(state_dir)
        self._is_passing = is_passing
        self._directory = self._base / (f"{_PASSING}{os.getpid()}" if is_passing else _name_of(listening))

    def prepare(self, max_file_bytes: int, log: Callable[[str], None]) -> Path:
        """Create missing files and check the database; set a damaged one aside. Return its path. Raises StateError."""
        path = self._directory / _FILE
        try:
            check_directory(self._directory, Trust.PRIVATE)
            self._remove_leftovers()
            if self._is_passing:
                # An earlier process with this one's number has left the same directory: it was removed.
                check_directory(self._directory, Trust.PRIVATE)
                (self._directory / _OWNER_FILE).write_text(owner.own_name(), encoding="ascii")
            try:
                check_file(path, max_file_bytes=max_file_bytes)
            except CorruptFileError as error:
                aside = path.with_name(f"{_FILE}.damaged")
                log(f"{error}; it is now {aside}, and an empty one takes its place")
                path.replace(aside)
                for suffix in ("-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                check_file(path, max_file_bytes=max_file_bytes)
        except (UnsafeDirectory, UnusableFileError) as error:
            raise StateError(str(error)) from None
        except OSError as error:
            raise StateError(f"{self._directory} cannot be used: {error.strerror or error}") from None
        return path

    def close(self) -> None:
        """Remove files that nobody will use again."""
        if self._is_passing:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove the directories of servers that were killed."""
        for directory in self._base.glob(f"{_PASSING}*"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                name = (directory / _OWNER_FILE).read_text(encoding="ascii")
                # A server that has just begun has not written its name yet.
                if name and not directory.is_symlink() and not owner.lives(name):
                    shutil.rmtree(directory)


def max_file_bytes(max_stored_bytes: int, num_workers: int) -> int:
    """Return the bound of the file.

    It is twice the counted size, for indices and pages that are partly filled, plus the space for running responses,
    which are never evicted.
    """
    return 2 * max_stored_bytes + num_workers * HARD_BOUND_BYTES


def open_database(path: str | None, max_file_bytes: int) -> Database:
    """Open the database that the command has prepared.

    It is in memory if there is none, or if it can no longer be opened.
    """
    if path is not None:
        try:
            return Database(Path(path), max_file_bytes=max_file_bytes)
        except (UnusableFileError, OSError) as error:
            logger.error("responses are kept in the memory of this worker: %s", error)
    return Database(None, max_file_bytes=max_file_bytes)


def _name_of(listening: socket.socket) -> str:
    """Return a file name for the address: 127.0.0.1-8000, unix-… for a Unix socket."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        path = name if isinstance(name, bytes) else os.fsencode(os.path.abspath(name))
        return f"unix-{blake2b(path, digest_size=8).hexdigest()}"
    host, port = name[:2]
    return f"{re.sub('[^0-9a-zA-Z.]', '-', host)}-{port}"
