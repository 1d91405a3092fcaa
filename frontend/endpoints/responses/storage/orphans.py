"""Background responses whose worker died or put them back: another worker takes them over, or they end.

The functions work inside a transaction of the store.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.frontend.endpoints.responses.background_places import BackgroundClaim
from penstock.frontend.endpoints.responses.storage import owner
from penstock.frontend.endpoints.responses.storage.stored_events import add_events, all_events

MAX_TAKEOVERS = 3
"""Workers that may die of one request. After that many it is not started again."""
_WORKER_DIED = "the worker that generated this response died; what it had generated is kept. Send the request again"
NOBODY = ""
"""The owner of a response that was put back: it names no process."""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """The part of a run that is kept while it is not complete."""

    claim: BackgroundClaim
    request: bytes
    """An encoded `background.takeover.KeptRequest`."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A response whose owner has died or put it back."""

    tenant: bytes
    response_id: str
    claim: BackgroundClaim | None
    """Its place in the background; None if it cannot run again."""
    was_put_back: bool


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A response that this process has taken over, in the state that its earlier owner left."""

    tenant: bytes
    response_id: str
    body: bytes
    input_items: bytes
    message_data: bytes
    request: bytes
    events: list[bytes]


def keep_run(connection: sqlite3.Connection, key: int, run: KeptRun) -> None:
    connection.execute(
        "INSERT INTO runs (response, num_takeovers, payer, num_claimed_bytes, request) VALUES (?, 0, ?, ?, ?)",
        (key, run.claim.payer, run.claim.num_bytes, run.request),
    )
    connection.execute("UPDATE responses SET num_bytes = num_bytes + ? WHERE key = ?", (len(run.request), key))


def forget_run(connection: sqlite3.Connection, key: int) -> None:
    connection.execute(
        "UPDATE responses SET num_bytes = num_bytes - "
        "coalesce((SELECT length(request) FROM runs WHERE response = ?), 0) WHERE key = ?",
        (key, key),
    )
    connection.execute("DELETE FROM runs WHERE response = ?", (key,))


def find_orphans(connection: sqlite3.Connection) -> list[Orphan]:
    """Return the responses whose owners have died or put them back, oldest first."""
    names = connection.execute("SELECT DISTINCT owner FROM responses WHERE owner IS NOT NULL").fetchall()
    rows = [
        row
        for (name,) in names
        if not owner.lives(name)
        for row in connection.execute(
            "SELECT key, tenant, response_id, owner, is_cancelled, keeps_events, num_takeovers, payer, "
            "num_claimed_bytes FROM responses LEFT JOIN runs ON response = key WHERE owner = ?",
            (name,),
        )
    ]
    orphans = []
    for _, tenant, response_id, name, is_cancelled, keeps_events, num_takeovers, payer, num_bytes in sorted(rows):
        is_hopeless = is_cancelled or num_takeovers is None or num_takeovers >= MAX_TAKEOVERS
        claim = None if is_hopeless else BackgroundClaim(payer, num_bytes, bool(keeps_events))
        orphans.append(Orphan(tenant, response_id, claim, name == NOBODY))
    return orphans


def take_over(connection: sqlite3.Connection, tenant: bytes, response_id: str, now_s: float) -> TakenOver | None:
    """Make this process the owner of a response without a living owner; end it if it must not run again.

    Returns None if it ended, or if another worker was faster.
    """
    row = connection.execute(
        "SELECT key, owner, is_cancelled, body, input_items, messages, num_takeovers, request "
        "FROM responses LEFT JOIN runs ON response = key WHERE tenant = ? AND response_id = ? AND owner IS NOT NULL",
        (tenant, response_id),
    ).fetchone()
    if row is None or owner.lives(row[1]):
        return None
    key, _, is_cancelled, body, input_items, messages, num_takeovers, request = row
    if is_cancelled:
        break_off(connection, key, None, now_s)
        return None
    if request is None or num_takeovers >= MAX_TAKEOVERS:
        error = _WORKER_DIED
        if request is not None:
            error = f"{num_takeovers + 1} workers died while they generated this response; it is not begun again"
        break_off(connection, key, error, now_s)
        return None
    connection.execute("UPDATE responses SET owner = ? WHERE key = ?", (owner.own_name(), key))
    connection.execute("UPDATE runs SET num_takeovers = num_takeovers + 1 WHERE response = ?", (key,))
    return TakenOver(tenant, response_id, body, input_items, messages, request, all_events(connection, key))


def put_back(connection: sqlite3.Connection, key: int) -> None:
    """Leave a response of this process to the next worker that has room.

    That takeover will not count as a death.
    """
    connection.execute("UPDATE responses SET owner = ? WHERE key = ?", (NOBODY, key))
    connection.execute("UPDATE runs SET num_takeovers = num_takeovers - 1 WHERE response = ?", (key,))


def break_off(connection: sqlite3.Connection, key: int, error: str | None, now_s: float) -> bytes:
    """End a response with its stored output: as failed, or without an error as cancelled. Return its last event."""
    body, keeps_events = connection.execute("SELECT body, keeps_events FROM responses WHERE key = ?", (key,)).fetchone()
    num_events = len(all_events(connection, key))
    ended, event = _broken_off(body, num_events, error)
    connection.execute(
        "UPDATE responses SET owner = NULL, used_s = ?, body = ?, num_bytes = num_bytes + ? WHERE key = ?",
        (now_s, ended, len(ended) - len(body), key),
    )
    forget_run(connection, key)
    if keeps_events and event:
        add_events(connection, key, num_events, event)
    return event


def _broken_off(body: bytes, num_events: int, error: str | None) -> tuple[bytes, bytes]:
    """Return the response object as failed, and event number num_events, which reports it.

    Without an error the response was cancelled, which no event reports.
    """
    response: dict[str, Any] = msgspec.json.decode(body)
    response["status"] = "cancelled" if error is None else "failed"
    response["error"] = None if error is None else {"code": "server_error", "message": error}
    for item in response["output"]:
        if item.get("status") == "in_progress":
            item["status"] = "incomplete"
    whole = msgspec.json.encode(response)
    if error is None:
        return whole, b""
    data = msgspec.json.encode({"type": "response.failed", "response": response, "sequence_number": num_events})
    return whole, b"event: response.failed\ndata: %b\n\n" % data
