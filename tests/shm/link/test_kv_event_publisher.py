"""KV events, read by a subscriber that knows only the documented format."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.kv_cache.page_hash import extend_page_hashes, partial_page_hash
from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.shm.link.kv_event_publisher import CannotPublish, KvEventPublisher

PAGE = 4
SALT = b"tenant"


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher("tcp://127.0.0.1:*", "kv", PAGE, medium="CPU", clock=lambda: 5.0)
    yield publisher
    publisher.close()


@pytest.fixture
def subscriber(publisher: KvEventPublisher) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, 60_000)
    subscriber.setsockopt(zmq.LINGER, 0)
    subscriber.subscribe(b"")
    subscriber.connect(publisher.endpoint)
    while not subscriber.poll(10):  # until the subscription has arrived
        publisher.note_removed(bytes(16))
        publisher.publish()
    while subscriber.poll(50):
        subscriber.recv_multipart()
    yield subscriber
    subscriber.close()
    context.term()


def received(subscriber: zmq.Socket[bytes]) -> tuple[int, Batch]:
    topic, number, payload = subscriber.recv_multipart()
    assert topic == b"kv"
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)


def hashes_of(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_page_hashes(hashes, array("i", tokens), len(tokens), PAGE, SALT)
    return hashes


def number(page_hash: bytes) -> int:
    return int.from_bytes(page_hash[:8], "big")


def index(pool: PagePool, pages: list[int], tokens: list[int], hashes: list[bytes]) -> None:
    for place, (page, page_hash) in enumerate(zip(pages, hashes, strict=True)):
        content = array("i", tokens[place * PAGE : (place + 1) * PAGE]).tobytes()
        pool.index_page(page, content, IndexedPage(page_hash, hashes[place - 1] if place else SALT, SALT))


def test_a_prompts_pages_are_one_event_and_eviction_is_another(
    publisher: KvEventPublisher, subscriber: zmq.Socket[bytes]
) -> None:
    pool = PagePool(3, observers=[publisher])
    tokens = list(range(2 * PAGE))
    hashes, pages = hashes_of(tokens), pool.allocate(3)
    index(pool, pages[:2], tokens, hashes)
    part = array("i", [7]).tobytes()
    pool.index_page(pages[2], part, IndexedPage(partial_page_hash(hashes[1], part), hashes[1], SALT))
    publisher.publish()
    publisher.publish()  # nothing is new, so nothing is sent
    first, batch = received(subscriber)
    numbers = [number(page_hash) for page_hash in hashes]
    assert batch == Batch(5.0, [BlockStored(numbers, None, tokens, PAGE, None, "CPU")], 0)

    pool.release(pages)
    pool.allocate(3)
    publisher.publish()
    second, batch = received(subscriber)
    assert second == first + 1
    (removed,) = batch.events
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(numbers)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_events_add_up_to_the_pages_that_can_be_found(todo: list[tuple[bool, int]]) -> None:
    found: dict[bytes, bytes | None] = {}

    class Seen:
        def note_stored(self, page_hash: bytes, parent_hash: bytes, salt: bytes, content: bytes) -> None:
            assert page_hash not in found
            assert len(content) == 4 * PAGE
            found[page_hash] = None if parent_hash == salt else parent_hash

        def note_removed(self, page_hash: bytes) -> None:
            del found[page_hash]

    pool, every = PagePool(4, observers=[Seen()]), [hashes_of([first] * 2 * PAGE) for first in range(6)]
    for adds, which in todo:
        if adds:
            pages = pool.allocate(2)
            index(pool, pages, [which] * 2 * PAGE, every[which])
            pool.release(pages)
        else:
            pool.discard(every[which])
    for first, second in every:
        assert (first in found) == (pool.find(first) is not None)
        assert (second in found) == (pool.find(second) is not None)
        assert found.get(first) is None
        assert found.get(second, first) == first


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://300.0.0.1:1"])
def test_an_unusable_endpoint_is_named(endpoint: str) -> None:
    with pytest.raises(CannotPublish, match=f"^{endpoint} cannot be used: "):
        KvEventPublisher(endpoint, "kv", PAGE, medium="CPU")
