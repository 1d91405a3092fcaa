"""The SQLite database of a server's responses: one file that all workers open, or memory of one worker.

Each worker has one connection, used by one thread, so that the disk never holds up the event loop. All values are bound
to statements; no value is written into a statement's text.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.process.logs import RareLine, one_line

logger = logging.getLogger("penstock.responses")

T = TypeVar("T")

SCHEMA_VERSION = 2
"""A file of a later version is not opened."""
_LOCK_TIMEOUT_S = 2.0
"""A call waits this long for other processes, and for the calls before it."""
_LOCKED_FOR_S = 1.0
"""After a wait that failed, calls do not wait for this long: one request may make several calls."""
_WAL_BYTES = 4 << 20
_PRIMARY_CODE = 0xFF
"""The part of an extended error code that names the kind of error."""
_UNUSABLE = ("not a database", "malformed", "corrupt")
_BUGS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.NotSupportedError)
"""Errors of a wrong statement. The file, the disk or another process cause all other errors."""
_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk failed",
    sqlite3.SQLITE_CORRUPT: "the store's file is damaged",
    sqlite3.SQLITE_NOTADB: "the store's file is damaged",
    sqlite3.SQLITE_BUSY: "another process used the store's file for too long",
}
"""What clients learn of an error, by its primary code."""

_RESPONSES = """
CREATE TABLE responses (
    key INTEGER PRIMARY KEY,
    tenant BLOB NOT NULL,
    response_id TEXT NOT NULL,
    used_s REAL NOT NULL,           -- last use, seconds since 1970
    num_bytes INTEGER NOT NULL,     -- what is counted against the limits
    owner TEXT,                     -- the process that generates it; NULL once it has ended
    is_cancelled INTEGER NOT NULL,  -- its owner is to end it
    is_background INTEGER NOT NULL,
    keeps_events INTEGER NOT NULL,
    body BLOB NOT NULL,             -- the response object, JSON
    input_items BLOB NOT NULL,      -- the request's items, JSON
    messages BLOB NOT NULL,         -- the conversation including the answer, JSON
    UNIQUE (tenant, response_id)
) STRICT;
CREATE INDEX sizes ON responses (tenant, num_bytes);
CREATE INDEX uses ON responses (used_s);
CREATE INDEX owners ON responses (owner) WHERE owner IS NOT NULL;
CREATE TABLE events (
    response INTEGER NOT NULL REFERENCES responses (key) ON DELETE CASCADE,
    first INTEGER NOT NULL,         -- number of the first event
    data BLOB NOT NULL,             -- one or more whole events
    PRIMARY KEY (response, first)
) STRICT;
"""
_RUNS = """
CREATE TABLE runs (
    response INTEGER PRIMARY KEY REFERENCES responses (key) ON DELETE CASCADE,
    num_takeovers INTEGER NOT NULL,
    payer BLOB NOT NULL,            -- whose place in the background it takes
    num_claimed_bytes INTEGER NOT NULL,
    request BLOB NOT NULL           -- what a worker needs to run it from its start, JSON
) STRICT;
"""
_STEPS = (_RESPONSES, _RUNS)
"""The statements that lead from each version to the next; version 0 is an empty file."""


class UnusableFileError(Exception):
    """The file is not a database, is damaged, or has another version. The message is one line."""


class StoreFailedError(ApiError):
    """503, which names the reason."""

    def __init__(self, reason: str) -> None:
        message = f"the store of responses cannot be used now: {reason}; retry later, or send store=false"
        super().__init__(ErrorKind.UNAVAILABLE, message, headers=((b"retry-after", b"5"),))
        self.reason = reason


class CorruptFileError(UnusableFileError):
    """The file is damaged or not a database."""


class Database:
    """One worker's connection. Without a path the database is in memory, and `run` does not wait."""

    def __init__(self, path: Path | None, *, max_file_bytes: int) -> None:
        """Raises UnusableFileError, OSError."""
        self.is_shared = path is not None
        self._connection = _open(path, max_file_bytes)
        self._close_connection = weakref.finalize(self, self._connection.close)
        self._thread = None if path is None else ThreadPoolExecutor(1, "responses")
        self._failure = RareLine(logger, logging.ERROR)
        self._locked_until_s = 0.0

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a read-only function. Raises ApiError: 503."""
        return await self._run(work, "DEFERRED")

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function in one transaction, which is undone if it raises. Raises ApiError: 503."""
        return await self._run(work, "IMMEDIATE")

    async def _run(self, work: Callable[[sqlite3.Connection], T], kind: str) -> T:
        try:
            deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
            if self._thread is None:
                return self._transact(work, kind, deadline_s)
            return await _in_thread(self._thread, self._transact, work, kind, deadline_s)
        except sqlite3.DatabaseError as error:
            if isinstance(error, _BUGS):
                raise
            self._warn(error)
            raise StoreFailedError(_REASONS.get(error.sqlite_errorcode & _PRIMARY_CODE, "it failed")) from None

    async def scrub(self) -> None:
        """Remove deleted responses from the write-ahead log on disk."""
        if self._thread is not None:
            await _in_thread(self._thread, self._truncate_log)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._close_connection()

    def _transact(self, work: Callable[[sqlite3.Connection], T], kind: str, deadline_s: float) -> T:
        with self._waiting_until(deadline_s), _transaction(self._connection, kind):
            return work(self._connection)

    @contextmanager
    def _waiting_until(self, deadline_s: float) -> Iterator[None]:
        """Let the connection wait for locks until this time, but not for a while after a wait that failed.

        It still tries: another process that writes does not keep this one from reading.
        """
        now_s = time.monotonic()
        timeout_s = max(0.0, deadline_s - now_s) if now_s >= self._locked_until_s else 0.0
        self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * timeout_s)}").fetchall()
        try:
            yield
        except sqlite3.OperationalError as error:
            if timeout_s and error.sqlite_errorcode & _PRIMARY_CODE == sqlite3.SQLITE_BUSY:
                self._locked_until_s = time.monotonic() + _LOCKED_FOR_S
            raise

    def _truncate_log(self) -> None:
        try:
            with self._waiting_until(time.monotonic() + _LOCK_TIMEOUT_S):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.DatabaseError as error:  # the next deletion tries again
            self._warn(error)

    def _warn(self, error: sqlite3.DatabaseError) -> None:
        self._failure.log(f"the store of responses cannot be used: {error}")


async def _in_thread(thread: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
    import asyncio  # the commands that only check the file do without

    return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)


def check_file(path: Path, *, max_file_bytes: int) -> None:
    """Create the database, or check an existing one completely. Raises UnusableFileError, OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.close(fd)
    with closing(_open(path, max_file_bytes)) as connection:
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            found = str(error)
    if found != "ok":
        raise CorruptFileError(f"{path} is damaged: {one_line(found)}")


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:  # whatever ended the work: the next transaction must not find this one open
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise


def _open(path: Path | None, max_file_bytes: int) -> sqlite3.Connection:
    """Raises UnusableFileError, OSError."""
    try:
        connection = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=_LOCK_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.OperationalError as error:
        raise OSError(f"{path}: {error}") from None
    with ExitStack() as on_error:
        on_error.callback(connection.close)
        try:
            _set_up(connection, path, max_file_bytes)
        except sqlite3.DatabaseError as error:
            if isinstance(error, _BUGS):
                raise
            if any(word in str(error) for word in _UNUSABLE):
                raise CorruptFileError(f"{path}: {one_line(error)}") from None
            raise OSError(f"{path}: {one_line(error)}") from None
        on_error.pop_all()
    return connection


def _set_up(connection: sqlite3.Connection, path: Path | None, max_file_bytes: int) -> None:
    """Raises UnusableFileError, sqlite3.DatabaseError."""
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    for setting in (
        "foreign_keys = ON",
        "secure_delete = ON",  # a deleted response is overwritten
        "trusted_schema = OFF",
        "synchronous = NORMAL",  # a power failure may lose the latest responses, never the file
        f"max_page_count = {max_file_bytes // page_bytes}",
        f"journal_size_limit = {_WAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {setting}")
    if path is not None:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise UnusableFileError(f"{path}: its file system cannot share a database between processes")
    with _transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version < SCHEMA_VERSION:
            for statement in "".join(_STEPS[version:]).split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version > SCHEMA_VERSION:
            raise UnusableFileError(
                f"{path} has version {version} and this server reads version {SCHEMA_VERSION}; remove it, or choose "
                "another --state-dir"
            )
