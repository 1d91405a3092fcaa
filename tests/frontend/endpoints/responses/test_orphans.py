"""Responses whose worker has died, in the store: taken over once at a time and a few times, or ended."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import msgspec
import pytest

from penstock.frontend.endpoints.responses.background_places import BackgroundClaim
from penstock.frontend.endpoints.responses.storage import owner
from penstock.frontend.endpoints.responses.storage.database import check_file
from penstock.frontend.endpoints.responses.storage.orphans import MAX_TAKEOVERS, KeptRun, Orphan
from penstock.frontend.endpoints.responses.storage.stored_events import StoredEvents
from tests.frontend.endpoints.responses.test_store import MAX_FILE_BYTES, done, response, store_in

KEPT = KeptRun(BackgroundClaim(b"payer", 1000, is_streamed=True), b"{}")


def test_orphan_is_taken_over_by_one_process_and_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in()
    done(store.begin(b"", response("resp_1", keeps_events=True), KEPT))
    done(store.update(b"", "resp_1", None, 0, b"a\n\n"))
    assert done(store.orphans()) == []
    for number in range(MAX_TAKEOVERS):
        living = f"process {number}"
        monkeypatch.setattr(owner, "lives", lambda name, living=living: name == living)
        monkeypatch.setattr(owner, "own_name", lambda living=living: living)
        (orphan,) = done(store.orphans())
        assert orphan == Orphan(b"", "resp_1", KEPT.claim, was_put_back=False)
        taken = done(store.take_over(orphan))
        assert taken is not None
        assert (taken.request, taken.events) == (b"{}", [b"a\n\n"])
        assert (done(store.take_over(orphan)), done(store.orphans())) == (None, [])
        done(store.put_back(b"", "resp_1"))  # a full queue does not count as a death
        (orphan,) = done(store.orphans())
        assert done(store.take_over(orphan)) is not None
    monkeypatch.setattr(owner, "lives", lambda _name: False)
    (orphan,) = done(store.orphans())
    assert (orphan.claim, done(store.take_over(orphan))) == (None, None)
    assert done(store.orphans()) == []
    events = done(store.events(b"", "resp_1", 0))
    assert events is not None
    assert (len(events.events), events.is_running) == (2, False)
    found = done(store.get(b"", "resp_1"))
    assert found is not None
    assert msgspec.json.decode(found.body)["error"]["message"].startswith("4 workers died")
    assert done(store.sizes())[b""][0] == found.num_bytes + len(b"".join(events.events))


def test_response_that_is_put_back_does_not_wear_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in()
    done(store.begin(b"", response("resp_1", keeps_events=True), KEPT))
    for _ in range(MAX_TAKEOVERS + 2):
        done(store.put_back(b"", "resp_1"))
        assert done(store.events(b"", "resp_1", 0)) == StoredEvents([], is_running=True, is_waiting=True)
        (orphan,) = done(store.orphans())
        assert orphan == Orphan(b"", "resp_1", KEPT.claim, was_put_back=True)
        assert done(store.take_over(orphan)) is not None
        assert done(store.events(b"", "resp_1", 0)) == StoredEvents([], is_running=True)
    monkeypatch.setattr(owner, "lives", lambda _name: False)
    (orphan,) = done(store.orphans())
    assert orphan.claim is not None


def test_earlier_owner_changes_nothing_after_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    store, running = store_in(), response("resp_1", keeps_events=True)
    done(store.begin(b"", running, KEPT))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(owner, "lives", lambda _name: False)
        elsewhere.setattr(owner, "own_name", lambda: "elsewhere")
        assert done(store.take_over(done(store.orphans())[0])) is not None
    assert not done(store.update(b"", "resp_1", b"x", 0, b"a\n\n"))
    done(store.end(b"", response("resp_1", 100), 0, b"a\n\n"))
    assert done(store.break_off(b"", "resp_1", "failed")) == b""
    done(store.put_back(b"", "resp_1"))
    monkeypatch.setattr(owner, "lives", lambda name: name == "elsewhere")
    assert done(store.orphans()) == []
    found = done(store.get(b"", "resp_1"))
    assert found is not None
    assert (found.body, found.is_running) == (running.body, True)


def test_cancelled_orphan_ends_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in()
    done(store.begin(b"", response("resp_1", keeps_events=True), KEPT))
    done(store.cancel(b"", "resp_1"))
    monkeypatch.setattr(owner, "lives", lambda _name: False)
    (orphan,) = done(store.orphans())
    assert (orphan.claim, done(store.take_over(orphan))) == (None, None)
    found = done(store.get(b"", "resp_1"))
    assert found is not None
    assert (found.is_running, msgspec.json.decode(found.body)["status"]) == (False, "cancelled")
    assert done(store.events(b"", "resp_1", 0)) == StoredEvents([], is_running=False)


def test_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    async def use() -> None:
        path = tmp_path / "db"
        check_file(path, max_file_bytes=MAX_FILE_BYTES)
        store = store_in(path)
        await store.put(b"", response("kept"))
        store.close()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript("DROP TABLE runs; PRAGMA user_version = 1")
        check_file(path, max_file_bytes=MAX_FILE_BYTES)
        store = store_in(path)
        assert await store.get(b"", "kept") is not None
        await store.begin(b"", response("begun"), KEPT)
        store.close()

    asyncio.run(use())
