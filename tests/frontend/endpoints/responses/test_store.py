"""The store of responses keeps its bounds under any sequence of operations, on disk as in memory."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.frontend.endpoints.responses.storage import owner
from penstock.frontend.endpoints.responses.storage.database import (
    CorruptFileError,
    Database,
    UnusableFileError,
    check_file,
)
from penstock.frontend.endpoints.responses.storage.store import ResponseStore, StoredResponse
from penstock.frontend.endpoints.responses.storage.stored_messages import NO_MESSAGES, add_messages, decode_messages
from penstock.frontend.schemas.chat import ChatMessage, FunctionCall, MessageToolCall
from penstock.frontend.transport.errors import ApiError

MAX_BYTES = 20_000
MAX_RESPONSES = 6
MAX_IDLE_S = 10.0
MAX_FILE_BYTES = 16 << 20
TENANTS = st.sampled_from([b"", b"a", b"b"])
IDS = st.sampled_from([f"resp_{number}" for number in range(8)])

T = TypeVar("T")


def done(call: Awaitable[T]) -> T:
    """Return the result of a call to a store in memory, which does not wait."""
    try:
        call.__await__().__next__()
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise AssertionError("a store in memory does not wait")


def response(response_id: str, num_bytes: int = 0, **fields: Any) -> StoredResponse:
    body = msgspec.json.encode({"id": response_id, "status": "in_progress", "output": [], "x": "x" * num_bytes})
    return StoredResponse(response_id, body, b"[]", NO_MESSAGES, **fields)


def store_in(path: Path | None = None, **changes: Any) -> ResponseStore:
    limits: dict[str, Any] = {"max_bytes": MAX_BYTES, "max_responses": MAX_RESPONSES, "max_idle_s": MAX_IDLE_S}
    limits |= changes
    return ResponseStore(Database(path, max_file_bytes=MAX_FILE_BYTES), **limits)


class Store(RuleBasedStateMachine):
    """Compares the store with a model made of plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1e9
        self.store = store_in(clock=lambda: self.now_s)
        self.kept: OrderedDict[tuple[bytes, str], tuple[int, float]] = OrderedDict()
        """Responses with size and last use, least recently used first."""

    def expire(self) -> None:
        for key, (_, used_s) in list(self.kept.items()):
            if used_s < self.now_s - MAX_IDLE_S:
                del self.kept[key]

    @rule(tenant=TENANTS, response_id=IDS, num_bytes=st.integers(0, MAX_BYTES + 100))
    def put(self, tenant: bytes, response_id: str, num_bytes: int) -> None:
        self.now_s += 2.0  # uses within a second are not told apart
        stored = response(response_id, num_bytes)
        done(self.store.put(tenant, stored))
        self.kept.pop((tenant, response_id), None)
        self.expire()
        if stored.num_bytes <= MAX_BYTES:
            self.kept[tenant, response_id] = (stored.num_bytes, self.now_s)
        in_store = self.in_store()
        while (excess := sum(size for size, _ in self.kept.values()) > MAX_BYTES) or len(self.kept) > MAX_RESPONSES:
            held: dict[bytes, int] = {}
            for (owner_, _), (size, _) in self.kept.items():
                held[owner_] = held.get(owner_, 0) + (size if excess else 1)
            largest = [tenant for tenant, size in held.items() if size == max(held.values())]
            oldest = [next(key for key in self.kept if key[0] == tenant) for tenant in largest]
            dropped = [key for key in oldest if key not in in_store]
            assert dropped, "the evicted response is not the oldest of the largest tenant"
            del self.kept[dropped[0]]
        assert set(self.kept) == in_store

    @rule(tenant=TENANTS, response_id=IDS)
    def get(self, tenant: bytes, response_id: str) -> None:
        self.now_s += 2.0
        self.expire()
        found = done(self.store.get(tenant, response_id))
        assert (found is not None) == ((tenant, response_id) in self.kept)
        if found is not None:
            assert found.response_id == response_id
            size, _ = self.kept.pop((tenant, response_id))
            self.kept[tenant, response_id] = (size, self.now_s)

    @rule(tenant=TENANTS, response_id=IDS)
    def remove(self, tenant: bytes, response_id: str) -> None:
        self.expire()
        assert done(self.store.remove(tenant, response_id)) == (self.kept.pop((tenant, response_id), None) is not None)

    @rule(seconds=st.floats(0.0, 6.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.expire()
        done(self.store.sweep())

    def in_store(self) -> set[tuple[bytes, str]]:
        rows = self.store._database._connection.execute("SELECT tenant, response_id FROM responses")
        return set(rows.fetchall())

    @invariant()
    def stays_within_its_bounds(self) -> None:
        sizes = done(self.store.sizes())
        assert sum(size for size, _ in sizes.values()) <= MAX_BYTES
        assert sum(count for _, count in sizes.values()) <= MAX_RESPONSES


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=50, stateful_step_count=25)


def test_response_larger_than_the_store_is_not_kept_and_evicts_nothing() -> None:
    store = store_in(max_bytes=2000)
    done(store.put(b"", response("small", 10)))
    assert "exceeds --response-store" in (done(store.put(b"", response("large", 5000))) or "")
    assert done(store.get(b"", "large")) is None
    assert done(store.get(b"", "small")) is not None


def test_many_small_responses_of_one_tenant_evict_no_large_one_of_another() -> None:
    store = store_in()
    done(store.put(b"quiet", response("large", 9000)))
    for number in range(20):
        done(store.put(b"busy", response(f"small_{number}")))
    assert done(store.get(b"quiet", "large")) is not None
    assert done(store.sizes())[b"busy"][1] == MAX_RESPONSES - 1


def test_response_that_runs_is_not_evicted_and_counts_its_events() -> None:
    store = store_in()
    running = response("running", keeps_events=True)
    done(store.begin(b"", running))
    assert done(store.update(b"", "running", None, 0, b"a\n\nb\n\n"))
    for number in range(20):
        done(store.put(b"", response(f"other_{number}")))
    found = done(store.get(b"", "running"))
    assert found is not None
    assert found.is_running
    events = done(store.events(b"", "running", 1))
    assert events is not None
    assert (events.events, events.is_running) == ([b"b\n\n"], True)
    done(store.cancel(b"", "running"))
    assert not done(store.update(b"", "running", None, 2, b"c\n\n"))
    done(store.end(b"", running, 3, b"d\n\n"))
    events = done(store.events(b"", "running", 0))
    assert events is not None
    assert (events.events, events.is_running) == ([b"a\n\n", b"b\n\n", b"c\n\n", b"d\n\n"], False)
    assert done(store.remove(b"", "running"))
    done(store.end(b"", running, 0, b""))  # its worker has not noticed yet
    assert done(store.get(b"", "running")) is None


def test_stores_make_different_ids() -> None:
    assert store_in().tag != store_in().tag


def test_messages_are_read_as_they_were_written() -> None:
    calls = [MessageToolCall("call_1", FunctionCall("no valid name: été", '{"a":1}'))]
    first = (ChatMessage("user", "hi 🐈"), ChatMessage("assistant", None, tool_calls=calls, reasoning_content="hm"))
    second = (ChatMessage("tool", "\x00", "f", "call_1"),)
    data = add_messages(add_messages(add_messages(NO_MESSAGES, first), ()), second)
    assert decode_messages(data) == (*first, *second)
    assert decode_messages(NO_MESSAGES) == ()


# On disk


def test_stores_of_several_workers_share_a_file(tmp_path: Path) -> None:
    async def use() -> None:
        check_file(tmp_path / "db", max_file_bytes=MAX_FILE_BYTES)
        stores = [store_in(tmp_path / "db", max_responses=100, max_bytes=1 << 20) for _ in range(3)]
        await asyncio.gather(*(store.put(b"", response(f"resp_{n}")) for n in range(10) for store in stores))
        assert [await store.sizes() for store in stores] == [await stores[0].sizes()] * 3
        assert (await stores[0].sizes())[b""][1] == 10
        for store in stores:
            store.close()

    asyncio.run(use())


def test_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    check_file(tmp_path / "newer", max_file_bytes=MAX_FILE_BYTES)
    connection = sqlite3.connect(tmp_path / "newer")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(UnusableFileError, match="newer has version 99"):
        check_file(tmp_path / "newer", max_file_bytes=MAX_FILE_BYTES)
    (tmp_path / "text").write_bytes(b"this is no database" * 100)
    with pytest.raises(CorruptFileError, match="not a database"):
        check_file(tmp_path / "text", max_file_bytes=MAX_FILE_BYTES)
    with pytest.raises(OSError, match="No such file"):
        check_file(tmp_path / "none" / "db", max_file_bytes=MAX_FILE_BYTES)


def test_fault_of_a_statement_is_no_503() -> None:
    async def use() -> None:
        store = store_in()
        await store.begin(b"", response("twice"))
        with pytest.raises(sqlite3.IntegrityError):
            await store.begin(b"", response("twice"))
        await store.put(b"", response("next"))

    asyncio.run(use())


def test_full_disk_is_a_503_and_loses_nothing_else(tmp_path: Path) -> None:
    async def use() -> None:
        check_file(tmp_path / "db", max_file_bytes=1 << 20)
        database = Database(tmp_path / "db", max_file_bytes=1 << 20)
        store = ResponseStore(database, max_bytes=1 << 30, max_responses=100, max_idle_s=MAX_IDLE_S)
        await store.put(b"", response("small"))
        with pytest.raises(ApiError, match="the disk is full; retry later") as refusal:
            await store.begin(b"", response("large", 2 << 20))
        assert refusal.value.kind.status == 503
        assert await store.put(b"", response("large", 2 << 20)) == "the disk is full"
        assert store.why_unstored(b"", "large") == "the disk is full"
        assert await store.get(b"", "small") is not None
        await store.put(b"", response("next"))
        store.close()
        store = ResponseStore(
            Database(tmp_path / "db", max_file_bytes=1 << 20),
            max_bytes=1 << 19,
            max_responses=100,
            max_idle_s=MAX_IDLE_S,
        )
        await store.begin(b"", response("grows"))
        await store.end(
            b"", response("grows", 2 << 20), 0, b""
        )  # larger than the store: dropped, and not written first
        assert await store.get(b"", "grows") is None
        store.close()

    asyncio.run(use())


def test_owner_lives_until_its_process_ends() -> None:
    code = f"from {owner.__name__} import own_name; print(own_name(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-3, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert owner.lives(name)
        assert owner.lives(owner.own_name())
        process.kill()
        process.wait()
        assert not owner.lives(name)
    boot, _, rest = owner.own_name().partition("/")
    for foreign in (f"{boot}0/{rest}", f"{owner.own_name()}0", "", "x/y/z/1"):
        assert not owner.lives(foreign)


def test_locked_file_delays_all_requests_together_as_long_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in the time that the database is told to wait, which has no noise."""
    told_ms: list[int] = []
    monkeypatch.setattr("penstock.frontend.endpoints.responses.storage.database._LOCK_TIMEOUT_S", 0.05)

    def trace(statement: str) -> None:
        name, _, value = statement.partition(" = ")
        if name == "PRAGMA busy_timeout":
            told_ms.append(int(value))

    async def use() -> None:
        check_file(tmp_path / "db", max_file_bytes=MAX_FILE_BYTES)
        store = store_in(tmp_path / "db")
        await store.put(b"", response("kept"))
        store._database._connection.set_trace_callback(trace)
        other = sqlite3.connect(tmp_path / "db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        outcomes = await asyncio.gather(*(store.put(b"", response(f"new_{number}")) for number in range(50)))
        assert outcomes == ["another process used the store's file for too long"] * 50
        assert 0 < told_ms[0] <= 50
        assert told_ms[1:] == [0] * 49
        assert await store.put(b"", response("later")) == outcomes[0]  # a request that comes later
        assert told_ms[50:] == [0]
        assert await store.get(b"", "kept") is not None, "a writer does not keep others from reading"
        other.close()
        await store.put(b"", response("later"))
        store._database._locked_until_s = 0.0
        await store.put(b"", response("much later"))
        assert told_ms[-1] > 0
        store.close()

    asyncio.run(use())
