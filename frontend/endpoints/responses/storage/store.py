"""Keeps responses in a database, by tenant, bounded by bytes, number and age. All workers may share it.

A background response is kept from its start, with its owner: the process that generates it. Only the owner changes it,
but anyone may ask the owner to cancel it, delete it, or take it over when the owner has died or put it back.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.frontend.endpoints.responses.storage import orphans, owner
from penstock.frontend.endpoints.responses.storage.database import Database, StoreFailedError
from penstock.frontend.endpoints.responses.storage.orphans import KeptRun, Orphan, TakenOver
from penstock.frontend.endpoints.responses.storage.stored_events import StoredEvents, add_events, events_from
from penstock.frontend.endpoints.responses.storage.stored_messages import decode_messages
from penstock.frontend.schemas.chat import ChatMessage
from penstock.frontend.transport.errors import ApiError

_OVERHEAD_BYTES = 1024
"""Added to each response's size for its row and its places in the indices."""
_USE_GRAIN_S = 1.0
"""A use is recorded only this long after the last one: a polling client would cause constant writes."""
_MAX_UNSTORED = 4096
_COLUMNS = "response_id, body, input_items, messages, is_background, keeps_events, owner, used_s"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response_id: str
    body: bytes
    """The response object as JSON."""
    input_items: bytes
    """The request's items as JSON."""
    message_data: bytes
    """The conversation including this answer, without instructions: each request has its own instructions."""
    is_background: bool = False
    keeps_events: bool = False
    is_running: bool = False

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        return decode_messages(self.message_data)

    @property
    def num_bytes(self) -> int:
        """The response's size for the bounds, without its events."""
        return _OVERHEAD_BYTES + len(self.body) + len(self.input_items) + len(self.message_data)


class ResponseStore:
    """When a bound is exceeded, evicts the least recently used response of the tenant with the most bytes, or with the
    most responses. Responses that run are never evicted. All methods raise ApiError (503) if the database fails."""

    def __init__(
        self,
        database: Database,
        *,
        max_bytes: int,
        max_responses: int,
        max_idle_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A response that is unused for max_idle_s is dropped."""
        self.tag = secrets.token_hex(4)
        """Part of the ids of this store's responses."""
        self.is_shared = database.is_shared
        self.max_idle_s = max_idle_s
        self._database = database
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._clock = clock
        self._unstored: OrderedDict[tuple[bytes, str], str] = OrderedDict()
        """Why `put` has not stored the latest of these responses."""

    async def put(self, tenant: bytes, response: StoredResponse) -> str | None:
        """Keep a response that has ended. If that is impossible, return the reason."""
        reason = None
        try:
            await self._put(tenant, response)
        except StoreFailedError as error:
            reason = error.reason
        if 0 < self._max_bytes < response.num_bytes:
            reason = f"its size of {response.num_bytes} bytes exceeds --response-store"
        if reason is not None:
            self._unstored[tenant, response.response_id] = reason
            if len(self._unstored) > _MAX_UNSTORED:
                self._unstored.popitem(last=False)
        return reason

    def why_unstored(self, tenant: bytes, response_id: str) -> str | None:
        """Return why this worker has not stored the response, if it knows."""
        return self._unstored.get((tenant, response_id))

    async def _put(self, tenant: bytes, response: StoredResponse) -> None:

        def write(connection: sqlite3.Connection) -> None:
            _delete(connection, tenant, response.response_id)
            self._expire(connection)
            if response.num_bytes <= self._max_bytes:
                self._insert(connection, tenant, response)
                self._evict(connection)

        await self._database.write(write)

    async def begin(self, tenant: bytes, response: StoredResponse, run: KeptRun | None = None) -> None:
        """Keep a response that this process generates, until `end`, and the data that another process needs to take it
        over."""

        def write(connection: sqlite3.Connection) -> None:
            self._expire(connection)
            key = self._insert(connection, tenant, response, owner.own_name())
            if run is not None:
                orphans.keep_run(connection, key, run)
            self._evict(connection)

        await self._database.write(write)

    async def update(self, tenant: bytes, response_id: str, body: bytes | None, first: int, events: bytes) -> bool:
        """Store the present body, and the events from this number on.

        Return False if the response must be cancelled, was deleted, or belongs to another process.
        """

        def write(connection: sqlite3.Connection) -> bool:
            row = connection.execute(
                "SELECT key, is_cancelled FROM responses WHERE tenant = ? AND response_id = ? AND owner = ?",
                (tenant, response_id, owner.own_name()),
            ).fetchone()
            if row is None:
                return False
            key, is_cancelled = row
            if body is not None:
                connection.execute(
                    "UPDATE responses SET body = ?, num_bytes = num_bytes + ? - length(body) WHERE key = ?",
                    (body, len(body), key),
                )
            if events:
                add_events(connection, key, first, events)
                self._evict(connection)
            return not is_cancelled

        return await self._database.write(write)

    async def end(self, tenant: bytes, response: StoredResponse, first: int, events: bytes) -> None:
        """Keep a response of this process in its final state, with its events from this number on.

        A deleted one stays deleted.
        """

        def write(connection: sqlite3.Connection) -> None:
            key = _own_key(connection, tenant, response.response_id)
            if key is None:
                return
            (num_event_bytes,) = connection.execute(
                "SELECT coalesce(sum(length(data)), 0) FROM events WHERE response = ?", (key,)
            ).fetchone()
            num_bytes = response.num_bytes + num_event_bytes + len(events)
            if num_bytes > self._max_bytes:  # not written first: the file may have no room for it
                connection.execute("DELETE FROM responses WHERE key = ?", (key,))
                return
            orphans.forget_run(connection, key)
            add_events(connection, key, first, events)
            connection.execute(
                "UPDATE responses SET owner = NULL, used_s = ?, body = ?, messages = ?, num_bytes = ? WHERE key = ?",
                (self._clock(), response.body, response.message_data, num_bytes, key),
            )
            self._evict(connection)

        await self._database.write(write)

    async def get(self, tenant: bytes, response_id: str) -> StoredResponse | None:
        now_s = self._clock()

        def look(connection: sqlite3.Connection) -> tuple[StoredResponse, float] | None:
            row = connection.execute(
                f"SELECT {_COLUMNS} FROM responses WHERE tenant = ? AND response_id = ? "  # noqa: S608 - our own columns
                "AND (used_s >= ? OR owner IS NOT NULL)",
                (tenant, response_id, now_s - self.max_idle_s),
            ).fetchone()
            if row is None:
                return None
            found_id, body, input_items, messages, is_background, keeps_events, owner_name, used_s = row
            found = StoredResponse(
                found_id,
                body,
                input_items,
                messages,
                is_background=bool(is_background),
                keeps_events=bool(keeps_events),
                is_running=owner_name is not None,
            )
            return found, used_s

        def note_use(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE responses SET used_s = ? WHERE tenant = ? AND response_id = ?", (now_s, tenant, response_id)
            )

        seen = await self._database.read(look)
        if seen is None:
            return None
        found, used_s = seen
        if used_s <= now_s - _USE_GRAIN_S:
            with suppress(ApiError):  # it can be read nevertheless
                await self._database.write(note_use)
        return found

    async def orphans(self) -> list[Orphan]:
        """Return the responses whose owners have died or put them back."""
        return await self._database.read(orphans.find_orphans)

    async def take_over(self, orphan: Orphan) -> TakenOver | None:
        """Become the owner of an orphan, or end it if it cannot run again.

        Returns None if it ended, or if another worker was faster.
        """
        now_s = self._clock()
        return await self._database.write(
            lambda connection: orphans.take_over(connection, orphan.tenant, orphan.response_id, now_s)
        )

    async def put_back(self, tenant: bytes, response_id: str) -> None:
        """Leave a response of this process to the next worker that has room."""

        def write(connection: sqlite3.Connection) -> None:
            key = _own_key(connection, tenant, response_id)
            if key is not None:
                orphans.put_back(connection, key)

        await self._database.write(write)

    async def break_off(self, tenant: bytes, response_id: str, error: str | None) -> bytes:
        """End a response of this process with its stored output: as failed, or without an error as cancelled. Return
        its last event."""

        def write(connection: sqlite3.Connection) -> bytes:
            key = _own_key(connection, tenant, response_id)
            return b"" if key is None else orphans.break_off(connection, key, error, self._clock())

        return await self._database.write(write)

    async def events(self, tenant: bytes, response_id: str, first: int) -> StoredEvents | None:
        """Return some events from this number on; None if the response is not kept."""

        def read(connection: sqlite3.Connection) -> StoredEvents | None:
            row = connection.execute(
                "SELECT key, owner FROM responses WHERE tenant = ? AND response_id = ?", (tenant, response_id)
            ).fetchone()
            if row is None:
                return None
            key, owner_name = row
            return StoredEvents(
                events_from(connection, key, first),
                is_running=owner_name is not None,
                is_waiting=owner_name == orphans.NOBODY,
            )

        return await self._database.read(read)

    async def cancel(self, tenant: bytes, response_id: str) -> None:
        """Ask the owner of a running response to cancel it."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE responses SET is_cancelled = 1 WHERE tenant = ? AND response_id = ? AND owner IS NOT NULL",
                (tenant, response_id),
            )

        await self._database.write(write)

    async def remove(self, tenant: bytes, response_id: str) -> bool:
        """Return whether the store had it."""

        def write(connection: sqlite3.Connection) -> bool:
            self._expire(connection)
            return _delete(connection, tenant, response_id)

        return await self._database.write(write)

    async def sweep(self) -> None:
        """Drop expired responses."""

        def write(connection: sqlite3.Connection) -> None:
            self._expire(connection)
            self._evict(connection)

        await self._database.write(write)

    async def scrub(self) -> None:
        """Remove deleted responses from the disk."""
        await self._database.scrub()

    async def sizes(self) -> dict[bytes, tuple[int, int]]:
        """Return each tenant's bytes and number of responses."""
        return await self._database.read(_sizes)

    def close(self) -> None:
        self._database.close()

    # Inside a transaction

    def _insert(
        self, connection: sqlite3.Connection, tenant: bytes, response: StoredResponse, owner_name: str | None = None
    ) -> int:
        """Return the row's key."""
        (key,) = connection.execute(
            "INSERT INTO responses (tenant, response_id, used_s, num_bytes, owner, is_cancelled, is_background, "
            "keeps_events, body, input_items, messages) VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?) RETURNING key",
            (
                tenant,
                response.response_id,
                self._clock(),
                response.num_bytes,
                owner_name,
                response.is_background,
                response.keeps_events,
                response.body,
                response.input_items,
                response.message_data,
            ),
        ).fetchone()
        return int(key)

    def _expire(self, connection: sqlite3.Connection) -> None:
        oldest_s = self._clock() - self.max_idle_s
        connection.execute("DELETE FROM responses WHERE used_s < ? AND owner IS NULL", (oldest_s,))

    def _evict(self, connection: sqlite3.Connection) -> None:
        sizes = _sizes(connection)
        while sizes:
            num_bytes = sum(size for size, _ in sizes.values())
            if num_bytes <= self._max_bytes and sum(count for _, count in sizes.values()) <= self._max_responses:
                return
            measure = 0 if num_bytes > self._max_bytes else 1
            tenant = max(sizes, key=lambda tenant: sizes[tenant][measure])
            row = connection.execute(
                "DELETE FROM responses WHERE key = (SELECT key FROM responses WHERE tenant = ? AND owner IS NULL "
                "ORDER BY used_s, key LIMIT 1) RETURNING num_bytes",
                (tenant,),
            ).fetchone()
            if row is None:  # all that this tenant has is running
                del sizes[tenant]
            else:
                sizes[tenant] = sizes[tenant][0] - row[0], sizes[tenant][1] - 1


def _own_key(connection: sqlite3.Connection, tenant: bytes, response_id: str) -> int | None:
    """Return the key of a response that this process generates; None if it was deleted, or another one has it."""
    row = connection.execute(
        "SELECT key FROM responses WHERE tenant = ? AND response_id = ? AND owner = ?",
        (tenant, response_id, owner.own_name()),
    ).fetchone()
    return None if row is None else int(row[0])


def _delete(connection: sqlite3.Connection, tenant: bytes, response_id: str) -> bool:
    deleted = connection.execute(
        "DELETE FROM responses WHERE tenant = ? AND response_id = ?", (tenant, response_id)
    ).rowcount
    return deleted > 0


def _sizes(connection: sqlite3.Connection) -> dict[bytes, tuple[int, int]]:
    rows = connection.execute("SELECT tenant, sum(num_bytes), count(*) FROM responses GROUP BY tenant")
    return {tenant: (num_bytes, count) for tenant, num_bytes, count in rows}
