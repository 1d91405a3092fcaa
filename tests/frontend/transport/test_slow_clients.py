"""Clients that send slowly: they lose their places to others, and honest clients are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.transport.asgi import AsgiMessage
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.incomplete import MIN_AGE_S, Incomplete, IncompleteBodies, client_network
from penstock.frontend.transport.serving import http_limits
from penstock.frontend.transport.serving.connections import Connections
from penstock.frontend.transport.serving.server import server_config
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, request_bytes
from tests.frontend.transport.test_http_limits import Clock

COMPLETIONS = "/v1/completions"
HEAD = b"GET /health HTTP/1.1\r\nhost: a\r\n"
BODY_BEGINS = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{"


# The place of what is incomplete


@given(
    limit=st.integers(1, 12),
    events=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 0.6)), max_size=60),
)
def test_incomplete_items_stay_within_their_bounds(limit: int, events: list[tuple[int, bool, float]]) -> None:
    displaced: list[int] = []
    incomplete = Incomplete[int](limit, displaced.append)
    born: dict[int, tuple[bytes, float]] = {}
    now_s = 0.0
    for item, (address, is_end, wait_s) in enumerate(events):
        now_s += wait_s
        if is_end and born:
            incomplete.discard(next(iter(born)))
            del born[next(iter(born))]
            continue
        born[item] = (b"%d" % address, now_s)
        incomplete.add(item, b"%d" % address, now_s)
        incomplete.add(item, b"%d" % address, now_s + 5)  # keeps its age
        assert len(displaced) <= 1
        for gone in displaced:
            owner, since_s = born.pop(gone)
            others = [each for each in born.values() if each[0] == owner]
            assert all(since_s <= other_since_s for _, other_since_s in others)
            assert now_s - since_s >= MIN_AGE_S or (owner != b"%d" % address and len(others) + 1 >= max(1, limit // 4))
        displaced.clear()
        assert len(incomplete) == len(born)
        if len(born) > limit:
            crowd = max(sum(each[0] == owner for each in born.values()) for owner, _ in born.values())
            young = [each for each in born.values() if now_s - each[1] < MIN_AGE_S]
            assert young or crowd == 1


def test_address_with_too_many_loses_even_young_items_to_others() -> None:
    displaced: list[str] = []
    incomplete = Incomplete[str](8, displaced.append)
    for number in range(8):
        incomplete.add(f"crowd {number}", b"crowd", 0.0)
    assert displaced == []
    incomplete.add("crowd 8", b"crowd", 0.1)
    assert displaced == []
    incomplete.add("other", b"other", 0.1)
    assert displaced == ["crowd 0"]
    incomplete.add("crowd 9", b"crowd", MIN_AGE_S)
    assert displaced == ["crowd 0", "crowd 1"]


@pytest.mark.parametrize(
    ("peer", "other", "is_same"),
    [
        (("10.0.0.1", 5), ("10.0.0.1", 6), True),
        (("10.0.0.1", 5), ("10.0.0.2", 5), False),
        (("2001:db8::1", 5, 0, 0), ("2001:db8::2:1", 5, 0, 0), True),
        (("2001:db8::1", 5, 0, 0), ("2001:db8:0:1::1", 5, 0, 0), False),
        (("::ffff:10.0.0.1", 5, 0, 0), ("10.0.0.1", 5), True),
        (("fe80::1%eth0", 5, 0, 0), ("fe80::2%eth1", 5, 0, 0), True),
        ("", None, True),
    ],
)
def test_clients_are_told_apart_by_address_or_network(peer: Any, other: Any, is_same: bool) -> None:
    assert (client_network(peer) == client_network(other)) is is_same


# Connections


@pytest.fixture
def connect_to_few(backend: FakeBackend, clock: Clock) -> Callable[[], ClientConnection]:
    """Open connections to a worker that allows 32, 16 of them incomplete, four of those from one address."""
    app = make_app(backend)
    config = server_config(app, Connections(32))
    return lambda: ClientConnection(app, config, clock)


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, b"\x0d\x0a"])
async def test_slow_heads_lose_their_places_to_new_connections(
    connect_to_few: Callable[[], ClientConnection], clock: Clock, sent: bytes
) -> None:
    slow = []
    for _ in range(30):
        slow.append(connect_to_few())
        slow[-1].send(sent)
        clock.advance(MIN_AGE_S)
        assert sum(not connection.transport.closed for connection in slow) <= 4
        honest = connect_to_few()
        assert (await honest.request("GET", "/health")).status == 200
        await honest.end()
    assert b"408" in slow[0].transport.output[:20] or sent == b""
    for connection in slow:
        await connection.end()


async def test_second_head_that_is_slow_loses_its_place_too(
    connect_to_few: Callable[[], ClientConnection], clock: Clock
) -> None:
    slow = [connect_to_few() for _ in range(4)]
    for connection in slow:
        assert (await connection.request("GET", "/health")).status == 200
        connection.send(b"GET /")
    clock.advance(MIN_AGE_S)
    honest = [connect_to_few() for _ in range(4)]
    for connection in honest:
        assert (await connection.request("GET", "/health")).status == 200
    assert sum(connection.transport.closed for connection in slow) >= 2
    for connection in (*slow, *honest):
        await connection.end()


async def test_idle_connections_are_closed_before_incomplete_ones(
    connect_to_few: Callable[[], ClientConnection], clock: Clock
) -> None:
    idle = [connect_to_few() for _ in range(31)]
    for connection in idle:
        assert (await connection.request("GET", "/health")).status == 200
    slow = connect_to_few()
    slow.send(b"GET")
    clock.advance(MIN_AGE_S)
    newcomer = connect_to_few()
    assert (await newcomer.request("GET", "/health")).status == 200
    assert [connection.transport.closed for connection in idle] == [True] + [False] * 30
    assert not slow.transport.closed
    for connection in (*idle, slow, newcomer):
        await connection.end()


async def test_answered_request_with_an_unread_body_loses_its_place(
    connect_to_few: Callable[[], ClientConnection], clock: Clock
) -> None:
    slow = []
    for _ in range(12):
        slow.append(connect_to_few())
        slow[-1].send(b"POST /health HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n")
        assert (await slow[-1].response()).status == 405
        clock.advance(MIN_AGE_S)
    assert sum(not connection.transport.closed for connection in slow) <= 5
    for connection in slow:
        await connection.end()


# Bodies


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that exchanges see."""
    now = [1000.0]
    monkeypatch.setattr("penstock.frontend.transport.exchange.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_slow_bodies_do_not_take_the_places_of_requests(backend: FakeBackend, now_s: list[float]) -> None:
    app = make_app(backend, max_open_requests=4)
    slow = []
    for _ in range(30):
        slow.append(ClientConnection(app))
        slow[-1].send(BODY_BEGINS)
        await asyncio.sleep(0)
        now_s[0] += MIN_AGE_S
        honest = ClientConnection(app)
        assert (await honest.post(COMPLETIONS, {"prompt": "x"})).status == 200
        await honest.end()
    response = await slow[0].response()
    assert (response.status, response.error["code"]) == (408, "request_timeout")
    await slow[0].closed()
    assert len(app.exchanges) <= 4
    assert app.exchanges.places.num_taken == 0
    for connection in slow:
        await connection.end()
    assert len(app.exchanges) == len(app.exchanges.incomplete) == 0


@pytest.mark.parametrize("body", [b"x" * 100, b""])
async def test_refused_requests_whose_bodies_are_dropped_do_not_take_places(
    backend: FakeBackend, now_s: list[float], body: bytes
) -> None:
    app = make_app(backend, max_open_requests=4, max_body_bytes=1000)
    too_large = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
    slow = []
    for _ in range(30):
        slow.append(ClientConnection(app))
        slow[-1].send(too_large + body)
        await slow[-1].output(b"413")
        now_s[0] += MIN_AGE_S
        honest = ClientConnection(app)
        assert (await honest.post(COMPLETIONS, {"prompt": "x"})).status == 200
        await honest.end()
    assert len(app.exchanges) <= 5
    for connection in slow:
        await connection.end()


async def test_requests_that_run_are_still_limited(backend: FakeBackend) -> None:
    backend.script = lambda _request: []
    app = make_app(backend, max_open_requests=2)
    connections = [ClientConnection(app) for _ in range(3)]
    for connection in connections:  # all arrive at once, so none is refused before its body is read
        connection.send(request_bytes("POST", COMPLETIONS, {"prompt": "x"})[:-1])
    for _ in range(5):
        await asyncio.sleep(0)
    for connection in connections:
        connection.send(b"}")
    assert (await connections[2].response()).status == 429
    assert len(backend.streams) == 2
    for connection in connections:
        await connection.end()


async def test_request_whose_discarding_has_just_timed_out_can_be_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the timeout and the turn of its task it is still among the incomplete ones."""
    monkeypatch.setattr("penstock.frontend.transport.exchange._DISCARD_TIMEOUT_S", 0.0)
    failures: list[Exception] = []

    def displace() -> None:
        try:
            exchange.displace()
        except Exception as error:  # noqa: BLE001 - the caller is another request, which would get it
            failures.append(error)

    async def receive() -> AsgiMessage:
        asyncio.get_running_loop().call_soon(displace)  # just after the timeout of 0 s
        return await asyncio.Future()

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    sent: list[AsgiMessage] = []
    scope = {"method": "POST", "path": "/x", "headers": [(b"content-length", b"1000000")]}
    exchange = Exchange(scope, receive, send, IncompleteBodies(10))
    await exchange.respond_error(ApiError(ErrorKind.BODY_TOO_LARGE, "too large"))
    assert failures == []
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


class Reader:
    """A request whose body is being read."""

    def __init__(self) -> None:
        self.is_displaced = False

    def displace(self) -> None:
        self.is_displaced = True


def test_bytes_of_incomplete_bodies_are_limited() -> None:
    bodies = IncompleteBodies(100, max_bytes=1000)
    readers = [Reader() for _ in range(6)]
    for number, reader in enumerate(readers):
        bodies.add(reader, b"a", 0.0)
        for held in (100, 300):
            bodies.hold(reader, held, 0.0)
        assert sum(not each.is_displaced for each in readers[: number + 1]) <= 3
    assert [reader.is_displaced for reader in readers] == [True] * 3 + [False] * 3
    for reader in readers:
        bodies.discard(reader)
    last = Reader()
    bodies.add(last, b"a", 0.0)
    bodies.hold(last, 1000, 0.0)
    assert not last.is_displaced


async def test_slow_head_is_told_why_it_lost_its_place(
    connect_to_few: Callable[[], ClientConnection], clock: Clock
) -> None:
    slow = connect_to_few()
    slow.send(HEAD)
    clock.advance(http_limits.HEAD_TIMEOUT_S - 1)
    others = [connect_to_few() for _ in range(4)]
    response = await slow.response()
    assert (response.status, response.error["code"]) == (408, "request_timeout")
    assert "another connection" in response.error["message"]
    for connection in (slow, *others):
        await connection.end()


@pytest.mark.parametrize("sends_much", [False, True])
async def test_refused_client_may_send_on_for_a_time_and_a_number_of_bytes(
    backend: FakeBackend, clock: Clock, monkeypatch: pytest.MonkeyPatch, sends_much: bool
) -> None:
    connection = ClientConnection(make_app(backend), loop=clock)
    monkeypatch.setattr(connection.transport, "write_eof", lambda: None)
    connection.send(b"no HTTP\r\n\r\n")
    assert (await connection.response()).status == 400
    if sends_much:
        connection.send(b"x" * http_limits.MAX_LINGER_BYTES)
        assert not connection.transport.closed
        connection.send(b"x")
    else:
        clock.advance(http_limits.LINGER_S / 2)
        connection.send(HEAD + b"\r\n")
        assert not connection.transport.closed
        clock.advance(http_limits.LINGER_S / 2)
    assert connection.transport.aborted
    assert connection.transport.output.count(b"content-length: ") == 1
    await connection.end()
