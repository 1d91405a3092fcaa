"""Pictures in prompts, from the request to the tokens: the engine with the fake pass, whose tokens depend on every byte
of every picture before them."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.engine.pictures.device_turns import DeviceTurns
from penstock.backend.engine.pictures.tower_thread import Encoding, TowerThread
from penstock.backend.forward_pass import FROM_EMBEDDINGS
from penstock.backend.passes.fake import EMBEDDING_SIZE, FakePass, FakeTower, embedded_token
from penstock.backend.passes.ops.prompt_embeddings import check_embeddings
from penstock.backend.sequences.pictures import PictureCache
from penstock.shm.memory.arena import DescriptorError
from penstock.shm.messages import (
    ArenaRef,
    AskQuote,
    FailureCode,
    Finish,
    Picture,
    picture_digest,
    picture_token_ids,
)
from tests.backend.engine.test_speculation import Eager
from tests.backend.harness import Bench, expected_tokens

GRID = (1, 1, 1)
ROW_BYTES = 4 * EMBEDDING_SIZE


class Pixels:
    """Stands in for the arenas of all frontends."""

    def __init__(self) -> None:
        self.stored: dict[int, bytes] = {}

    def store(self, pixels: bytes) -> ArenaRef:
        self.stored[len(self.stored)] = pixels
        return ArenaRef(0, len(self.stored) - 1, len(pixels))

    def read(self, ref: ArenaRef) -> memoryview:
        if ref.sequence not in self.stored:
            raise DescriptorError("freed")
        return memoryview(self.stored[ref.sequence])


class SteppedTower:
    """`TowerThread` by hand: an encoding ends when the test says so."""

    def __init__(self, tower: FakeTower) -> None:
        self.thread = TowerThread(tower, DeviceTurns(), lambda: None)
        self.results: queue.SimpleQueue[Encoding] = queue.SimpleQueue()
        self.encodings: list[Encoding] = []
        self.started: list[ArenaRef | None] = []

    def start(self, encoding: Encoding) -> None:
        assert not self.encodings, "two encodings at a time"
        self.encodings.append(encoding)
        self.started.append(encoding.picture.pixels)

    def finish(self) -> bool:
        if not self.encodings:
            return False
        self.thread.start(self.encodings.pop())
        self.results.put(self.thread.results.get(timeout=30))
        return True


class PictureBench(Bench):
    def __init__(self, cache_bytes: int = 1 << 20, *, sees_whole: bool = False, **options: Any) -> None:
        forward_pass = FakePass(options.get("vocab_size", 97), options.get("max_running", 8), tower=FakeTower())
        self.tower = SteppedTower(FakeTower())
        self.pixels = Pixels()
        self.cache = PictureCache(cache_bytes)

        def desk(scheduler: Any, delivery: Any) -> PictureDesk:
            pictures = scheduler.pictures
            return PictureDesk(self.tower, self.cache, ROW_BYTES, pictures, delivery, sees_whole=sees_whole)

        super().__init__(forward_pass=forward_pass, make_pictures=desk, **options)

    def ask(self, parts: list[int | bytes], max_tokens: int = 6, *, changes: Any = None, **options: Any) -> list[int]:
        """Submit a prompt of ids and pictures, and return the tokens that are due. changes(picture) damages one."""
        tokens, known, pictures = [], [], []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                known.append(part)
                continue
            shape = (len(part) // 4, 4)
            digest, count = picture_digest(shape, GRID, part), FakeTower().num_tokens(shape, GRID)
            halves = (count + 1) // 2, count // 2
            spans = [(len(tokens), halves[0])]
            ids = picture_token_ids(digest, count).tolist()
            rows = FakeTower().encode(np.frombuffer(part, np.uint8).reshape(shape), GRID, lambda: None)
            words = list(map(embedded_token, rows))
            tokens += ids[: halves[0]]
            known += words[: halves[0]]
            if halves[1]:  # a separator between two spans
                spans.append((len(tokens) + 1, halves[1]))
                tokens += [5, *ids[halves[0] :]]
                known += [5, *words[halves[0] :]]
            pictures.append(Picture(tuple(spans), digest, shape, GRID, self.pixels.store(part)))
        if changes is not None:
            pictures = [changes(picture) for picture in pictures]
        self.submit(tokens, max_tokens, pictures=tuple(pictures), **options)
        self.link.arrivals[-1] = replace(self.link.arrivals[-1], read_pixels=self.pixels.read)
        return expected_tokens(known, max_tokens, self.vocab_size)

    def run(self) -> None:
        """Turn until nothing is open; the tower is quick."""
        for _ in range(5000):
            if self.is_idle:
                return
            self.turn()
            self.tower.finish()
        raise AssertionError("requests are still open")

    def close(self) -> None:
        self.tower.thread.close()
        super().close()


@pytest.fixture
def bench() -> Iterator[PictureBench]:
    bench = PictureBench()
    yield bench
    bench.close()


def picture(num_tokens: int) -> bytes:
    return os.urandom(64 * num_tokens)


def test_tokens_follow_from_pictures_of_many_sizes_among_words(bench: PictureBench) -> None:
    prompts: list[list[int | bytes]] = [
        [picture(9)],
        [1, picture(1)],
        [1, 2, picture(30), 3, picture(7), picture(2), 4],
        [8] * 20,
        [*[7] * 15, picture(17), *[7] * 5],
    ]
    due = [bench.ask(parts, request_id=index) for index, parts in enumerate(prompts)]
    bench.run()
    assert [bench.received(index).token_ids for index in range(len(prompts))] == due
    assert len(bench.tower.started) == 6


def test_others_run_while_a_picture_waits_for_the_tower(bench: PictureBench) -> None:
    due = bench.ask([1, 2, 3, picture(5), 4])
    bench.submit([9, 9], request_id=1)
    for _ in range(20):
        bench.turn()
    assert bench.received(1).finishes == [Finish.LENGTH]
    assert bench.scheduler.num_running == 1
    assert not bench.received().token_ids
    bench.run()
    assert bench.received().token_ids == due


def test_a_prompt_that_begins_with_a_picture_takes_no_slot_before_it_is_encoded() -> None:
    bench = PictureBench(max_running=1)
    due = bench.ask([picture(5), 4])
    bench.submit([9, 9], request_id=1)
    for _ in range(20):
        bench.turn()
    assert bench.received(1).finishes == [Finish.LENGTH]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 1)
    bench.run()
    assert bench.received().token_ids == due
    bench.close()


def test_cached_pages_need_no_tower_and_tenants_share_none(bench: PictureBench) -> None:
    parts: list[int | bytes] = [1, picture(12), 2, 3, 4, 5, 6]
    due = bench.ask(parts)
    bench.run()
    bench.cache.add((b"", b""), np.zeros((1, 1 << 18), np.float32), set())  # evicts the embeddings
    bench.ask(parts, request_id=1)
    bench.run()
    assert bench.received(1).token_ids == due
    assert bench.received(1).started is not None
    assert bench.received(1).started.cached_tokens >= 16
    assert len(bench.tower.started) == 1
    bench.ask(parts, request_id=2, salt=b"other")
    bench.run()
    assert bench.received(2).token_ids == due
    assert len(bench.tower.started) == 2


def test_equal_requests_are_one_sequence_that_outlives_the_one_with_the_pixels(bench: PictureBench) -> None:
    parts: list[int | bytes] = [1, picture(12), 2]
    due = bench.ask(parts, may_share=True)
    bench.ask(parts, may_share=True, request_id=1)
    bench.turn()
    bench.cancel(0)
    del bench.pixels.stored[0]
    bench.run()
    assert bench.received(1).token_ids == due
    assert bench.board.requests_coalesced == 1


def test_equal_pictures_in_other_prompts_are_encoded_once(bench: PictureBench) -> None:
    same = picture(12)
    due = [bench.ask([first, same, 2, same], request_id=first) for first in range(3)]
    bench.run()
    assert [bench.received(first).token_ids for first in range(3)] == due
    assert len(bench.tower.started) == 1


def test_cancelling_ends_the_encoding_and_the_next_begins(bench: PictureBench) -> None:
    bench.ask([1, picture(12), 2])
    due = bench.ask([1, picture(3), 2], request_id=1)
    bench.turn()
    bench.cancel(0)
    bench.turn()
    assert bench.tower.encodings[0].is_cancelled
    bench.run()
    assert bench.received(1).token_ids == due
    assert bench.cache.num_bytes == 3 * ROW_BYTES


@pytest.mark.parametrize("max_running", [1, 3])
def test_small_memory_is_enough_for_many_pictures(max_running: int) -> None:
    """The cache holds one picture, the pages two prompts."""
    bench = PictureBench(cache_bytes=13 * ROW_BYTES, max_running=max_running, num_pages=26)
    due = [bench.ask([n, picture(12), 2, picture(13), 3, picture(11)], request_id=n) for n in range(6)]
    bench.run()
    assert [bench.received(n).token_ids for n in range(6)] == due
    assert bench.cache.num_bytes <= 13 * ROW_BYTES
    bench.close()


def test_tenants_take_turns_in_the_tower(bench: PictureBench) -> None:
    for index in range(6):
        bench.ask([picture(12), 2], request_id=index, tenant=b"many")
    bench.turn()
    late = picture(12)
    bench.ask([late, 2], request_id=6, tenant=b"one")
    bench.run()
    assert late in [bytes(bench.pixels.read(ref)) for ref in bench.tower.started[:3] if ref is not None]


def test_requests_fail_alone_for_bad_pixels_and_together_for_a_failed_tower(bench: PictureBench) -> None:
    parts: list[int | bytes] = [1, picture(12), 2]
    bench.ask(parts, may_share=True)
    due = bench.ask(parts, may_share=True, request_id=1)
    bench.pixels.stored[0] = bytes(64 * 12)
    bench.run()
    assert (failure := bench.received(0).failure) is not None
    assert (failure.code, failure.text) == (FailureCode.BAD_PICTURE, "the pixels are not those of the digest")
    assert bench.received(1).token_ids == due
    bench.ask([1, picture(3)], request_id=2)
    bench.turn()
    bench.tower.thread.tower = None
    bench.run()
    assert (failure := bench.received(2).failure) is not None
    assert failure.code == FailureCode.INTERNAL


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"digest": bytes(32)}, "the 6 tokens from 1 on are not those of its digest"),
        ({"spans": ((1, 12),)}, "the 12 tokens from 1 on are not those of its digest"),
        ({"spans": ((0, 6), (8, 6))}, "the 6 tokens from 0 on are not those of its digest"),
        ({"spans": ((1, 6), (6, 6))}, "its span of 6 tokens from 6 on is not between 7 and 15"),
        ({"spans": ((1, 6), (8, 600))}, "606 tokens; the model makes 12 of pixels [192, 4]"),
        ({"shape": (193, 4)}, "768 bytes of pixels; its shape [193, 4] has 772"),
        ({"shape": (1 << 19, 4)}, "2097152 bytes of pixels; the limit is 1048576"),
        ({"grid": (2, 1, 1)}, "its grid is (2, 1, 1); this model takes no videos"),
        ({"pixels": None}, "0 bytes of pixels; its shape [192, 4] has 768"),
    ],
)
def test_pictures_that_do_not_fit_their_tokens_are_refused(
    bench: PictureBench, change: dict[str, Any], text: str
) -> None:
    bench.ask([1, picture(12), 2], changes=lambda picture: msgspec.structs.replace(picture, **change))
    bench.turn()
    assert (failure := bench.received().failure) is not None
    assert (failure.code, failure.text) == (FailureCode.BAD_PICTURE, f"pictures[0]: {text}")
    assert bench.is_idle


def test_ids_of_pictures_are_refused_without_one(bench: PictureBench) -> None:
    bench.submit([1, -2])
    bench.turn()
    assert (failure := bench.received().failure) is not None
    assert failure.code == FailureCode.BAD_TOKEN


def test_a_quote_needs_no_pixels(bench: PictureBench) -> None:
    bench.ask([1, picture(12)], kind=AskQuote, changes=lambda picture: msgspec.structs.replace(picture, pixels=None))
    bench.turn()
    assert bench.received().finishes == [Finish.QUOTED]


def test_prompt_whose_whole_picture_finds_no_room_in_its_first_step_keeps_its_beginning() -> None:
    """The first request of two in a step leaves too few tokens for the other's picture, and is cancelled."""
    bench = PictureBench(sees_whole=True, max_batch_tokens=24, page_size=16)
    text, shown = list(range(10, 31)), picture(24)
    for request_id, prompt in enumerate(([*text, picture(4)], [1, shown])):
        bench.ask(prompt, request_id=request_id)
        bench.run()
    due = {2: bench.ask([3], 40, request_id=2)}
    for _ in range(3):
        bench.turn()
    bench.ask(list(range(50, 68)), request_id=3)
    due[4] = bench.ask([*text, shown], request_id=4)
    bench.turn()
    bench.cancel(3)
    bench.engine.turn()
    bench.run()
    for request_id, tokens in due.items():
        assert bench.received(request_id).token_ids == tokens
    bench.close()


def test_no_step_is_too_short_for_the_only_picture_that_can_be_computed() -> None:
    """A short prompt of another tenant, for which short steps are planned, waits for its own picture."""
    bench = PictureBench(sees_whole=True, max_batch_tokens=40, capacity=0)
    shown = picture(60)
    bench.ask([1, shown])
    bench.run()
    due = bench.ask([shown, 7], request_id=1, tenant=b"one")
    bench.turn()
    bench.ask([picture(3), 8], request_id=2, tenant=b"two")
    while not bench.received(1).finishes:
        bench.turn()
        assert bench.executor.is_busy or bench.received(1).finishes
    assert bench.received(1).token_ids == due
    bench.run()
    bench.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_gets_its_tokens(seed: int) -> None:
    """Few pages, slots and embeddings: sequences are preempted, pictures dropped, clients hang up, tenants compete.
    With odd seeds a picture's tokens attend to each other both ways."""
    chance, sees_whole = random.Random(seed), seed % 2 == 1
    bench = PictureBench(
        cache_bytes=20 * ROW_BYTES, num_pages=chance.choice([18, 40]), max_running=chance.choice([1, 4]),
        drafting=Eager(), vocab_size=6, sees_whole=sees_whole,
    )  # fmt: skip
    shown = [chance.randbytes(64 * chance.randrange(1, 16)) for _ in range(4)]
    due, left = {}, set()
    for request_id in range(30):
        parts = [chance.choice([1, 2, 3, *shown]) for _ in range(chance.randrange(1, 4))]
        parts = [1, 2, 3, 4, *parts, 1, 2, 3][chance.randrange(5) :]
        tenant = chance.choice([b"", b"one", b"two"])
        due[request_id] = bench.ask(parts, 8, request_id=request_id, tenant=tenant, may_share=chance.random() < 0.5)
        for _ in range(chance.randrange(4)):
            bench.turn()
            if chance.random() < 0.6:
                bench.tower.finish()
        if chance.random() < 0.2:
            left.add(chance.randrange(request_id + 1))
            bench.cancel(max(left))
    bench.run()
    for request_id in due.keys() - left:
        assert bench.received(request_id).token_ids == due[request_id]
    assert any(batch.drafts is not None for batch in bench.executor.batches)
    for batch in bench.executor.batches:
        assert batch.input_ids.min() >= FROM_EMBEDDINGS  # no pass receives a picture's id
        check_embeddings(batch)
        if batch.visible_ends is not None:  # no token sees one that is not computed
            lengths = np.diff(batch.query_starts)
            assert (batch.visible_ends <= np.repeat(batch.context_lens + lengths, lengths)).all()
    assert any(batch.visible_ends is not None for batch in bench.executor.batches) == sees_whole
    assert bench.scheduler.num_pages_held == 0
    assert bench.cache.num_bytes <= 20 * ROW_BYTES
    bench.close()
