"""The events of responses as rows: pieces of several events, each with the number of its first.

The functions work inside a transaction of the store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.frontend.transport.sse import split_events

_PIECE_BYTES = 256 << 10
_MAX_PIECES = 4
"""Pieces that are read at a time."""


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """Some events of a response, beginning with the one asked for."""

    events: Sequence[bytes]
    is_running: bool
    """Whether more may come."""
    is_waiting: bool = False
    """Whether a worker has put the response back, and none has taken it over yet."""


def add_events(connection: sqlite3.Connection, key: int, first: int, events: bytes) -> None:
    """Add events to the response with this key; first is the number of the first of them."""
    rows = [(key, first + before, piece) for before, piece in joined_pieces(split_events(events))]
    connection.executemany("INSERT INTO events (response, first, data) VALUES (?, ?, ?)", rows)
    connection.execute("UPDATE responses SET num_bytes = num_bytes + ? WHERE key = ?", (len(events), key))


def events_from(connection: sqlite3.Connection, key: int, first: int) -> list[bytes]:
    """Return some events from this number on."""
    pieces = connection.execute(
        "SELECT first, data FROM events WHERE response = ? AND first >= "
        "coalesce((SELECT max(first) FROM events WHERE response = ? AND first <= ?), 0) ORDER BY first LIMIT ?",
        (key, key, first, _MAX_PIECES),
    ).fetchall()
    events = [event for _, data in pieces for event in split_events(data)]
    skipped = first - pieces[0][0] if pieces else 0
    return events[max(0, skipped) :]


def all_events(connection: sqlite3.Connection, key: int) -> list[bytes]:
    pieces = connection.execute("SELECT data FROM events WHERE response = ? ORDER BY first", (key,))
    return [event for (data,) in pieces for event in split_events(data)]


def joined_pieces(events: Iterable[bytes]) -> Iterable[tuple[int, bytes]]:
    """Yield events joined to pieces of some size, each with the number of events before it."""
    piece, first, num_bytes, number = [], 0, 0, 0
    for number, event in enumerate(events, start=1):
        piece.append(event)
        num_bytes += len(event)
        if num_bytes >= _PIECE_BYTES:
            yield first, b"".join(piece)
            piece, first, num_bytes = [], number, 0
    if piece:
        yield first, b"".join(piece)
