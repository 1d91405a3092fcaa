"""The arena: a payload is read whole or refused, whatever the frontend does to the shared memory."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.shm.memory import arena
from penstock.shm.memory.arena import Arena, ArenaFull, ArenaReader, DescriptorError
from penstock.shm.messages import ArenaRef

ROOT = Path(__file__).parents[3]
SLOTS, SLOT_BYTES, EPOCH = 4, 8192, 77


class Pair(NamedTuple):
    fd: int
    writer: Arena
    reader: ArenaReader


@pytest.fixture
def pair() -> Iterator[Pair]:
    fd = arena.create_fd(SLOTS, SLOT_BYTES)
    pair = Pair(fd, Arena(fd, SLOTS, SLOT_BYTES, EPOCH), ArenaReader(fd, SLOTS, SLOT_BYTES, EPOCH))
    yield pair
    pair.writer.close()
    pair.reader.close()
    os.close(fd)


def test_written_payload_is_read_back(pair: Pair) -> None:
    payloads = [os.urandom(size) for size in (4, 100, 4096, pair.writer.capacity_bytes)]
    refs = [pair.writer.write(payload) for payload in payloads]
    assert [pair.reader.read(ref) for ref in refs] == payloads


def test_full_arena_raises_and_a_freed_slot_is_reused(pair: Pair) -> None:
    refs = [pair.writer.write(b"abcd") for _ in range(SLOTS)]
    with pytest.raises(ArenaFull):
        pair.writer.write(b"abcd")
    assert pair.writer.free(refs[1])
    again = pair.writer.write(b"efgh")
    assert again.slot == refs[1].slot
    assert pair.writer.slots_in_use == SLOTS


def test_freeing_is_idempotent_and_never_frees_a_later_payload(pair: Pair) -> None:
    first = pair.writer.write(b"abcd")
    assert pair.writer.free(first)
    assert not pair.writer.free(first)
    second = pair.writer.write(b"efgh")
    assert second.slot == first.slot
    assert not pair.writer.free(first)
    assert pair.reader.read(second) == b"efgh"


def test_old_descriptor_is_refused_after_its_slot_is_reused(pair: Pair) -> None:
    first = pair.writer.write(b"abcd")
    pair.writer.free(first)
    pair.writer.write(b"efgh")
    with pytest.raises(DescriptorError):
        pair.reader.read(first)


@pytest.mark.parametrize("size", [0, 3, SLOT_BYTES])
def test_payload_that_no_slot_holds_is_refused(pair: Pair, size: int) -> None:
    with pytest.raises(ValueError, match="a slot holds"):
        pair.writer.write(bytes(size))
    assert pair.writer.slots_in_use == 0


@pytest.mark.parametrize("stage", ["invalidated", "half the payload", "payload without header"])
def test_writer_that_dies_midway_leaves_nothing_valid(pair: Pair, stage: str) -> None:
    """A write that stops at each stage, over a valid payload of the same slot, length and sequence."""
    old = pair.writer.write(b"o" * 1000)
    start = old.slot * SLOT_BYTES
    pair.writer._invalidate(start)
    if stage == "half the payload":
        pair.writer._write_payload(start, b"n" * 500)
    elif stage == "payload without header":
        pair.writer._write_payload(start, b"n" * 1000)
    for sequence in range(old.sequence, old.sequence + 2):
        with pytest.raises(DescriptorError):
            pair.reader.read(ArenaRef(old.slot, sequence, 1000))


def test_payload_changed_after_its_header_is_refused(pair: Pair) -> None:
    ref = pair.writer.write(b"o" * 1000)
    pair.writer._write_payload(ref.slot * SLOT_BYTES, b"x")
    with pytest.raises(DescriptorError, match="checksum"):
        pair.reader.read(ref)


def test_payload_of_another_epoch_is_refused(pair: Pair) -> None:
    ref = pair.writer.write(b"abcd")
    other = ArenaReader(pair.fd, SLOTS, SLOT_BYTES, EPOCH + 1)
    with pytest.raises(DescriptorError):
        other.read(ref)
    other.close()


def test_forged_descriptors_are_refused(pair: Pair) -> None:
    real = pair.writer.write(os.urandom(512))
    rng = random.Random(5)
    edges = [
        0,
        1,
        3,
        4,
        31,
        32,
        33,
        512,
        SLOT_BYTES - 32,
        SLOT_BYTES,
        (1 << 31) - 1,
        1 << 32,
        (1 << 63) - 1,
        (1 << 64) - 8,
    ]
    for _ in range(100_000):
        slot, sequence, num_bytes = (
            rng.choice(edges) if rng.random() < 0.5 else rng.getrandbits(rng.randrange(1, 64)) for _ in range(3)
        )
        if (slot, sequence, num_bytes) == (real.slot, real.sequence, real.num_bytes):
            continue
        with pytest.raises(DescriptorError):
            pair.reader.read(ArenaRef(slot, sequence, num_bytes))
    for slot in (-1, -(1 << 40)):
        with pytest.raises(DescriptorError):
            pair.reader.read(ArenaRef(slot, 0, 512))


def test_hostile_header_reads_nothing_outside_the_slot(pair: Pair) -> None:
    ref = pair.writer.write(b"abcd")
    pair.writer.write(b"secret of the next slot")
    with mmap.mmap(pair.fd, SLOTS * SLOT_BYTES) as hostile:
        struct.pack_into("=Q", hostile, ref.slot * SLOT_BYTES + 24, 1 << 60)
        with pytest.raises(DescriptorError):
            pair.reader.read(ref)
        with pytest.raises(DescriptorError):
            pair.reader.read(ArenaRef(ref.slot, ref.sequence, 1 << 60))


FLIPPING_WRITER = """
import mmap, sys
mapping = mmap.mmap(int(sys.argv[1]), 4 * 8192)
print("ready", flush=True)
at = 0
while True:
    at = (at + 7919) % 4000
    mapping[32 + at] = ord("x")
    mapping[32 + at] = ord("o")
    for _ in range(at % 300):
        pass
"""


def test_payload_is_whole_or_refused_while_a_hostile_writer_changes_bytes(pair: Pair) -> None:
    payload = b"o" * 4000
    ref = pair.writer.write(payload)
    outcomes = set()
    with subprocess.Popen(
        [sys.executable, "-c", FLIPPING_WRITER, str(pair.fd)], stdout=subprocess.PIPE, pass_fds=[pair.fd], cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for reads in itertools.count():
            try:
                outcomes.add(pair.reader.read(ref))
            except DescriptorError:
                outcomes.add(b"refused")
            if reads > 2000 and len(outcomes) > 1:
                break
        child.kill()
    assert outcomes == {payload, b"refused"}


KILLED_WRITER = """
import sys
from penstock.shm.memory.arena import Arena
arena = Arena(int(sys.argv[1]), 4, 8192, 77)
print("ready", flush=True)
sequence = 0
while True:
    ref = arena.write(bytes([sequence % 251]) * (4 + sequence * 37 % 8000))
    sequence += 1
    arena.free(ref)
"""


def test_slots_of_a_killed_writer_are_whole_or_refused(pair: Pair) -> None:
    for delay_s in (0.0, 0.003, 0.011, 0.017):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(pair.fd)],
            stdout=subprocess.PIPE,
            pass_fds=[pair.fd],
            cwd=ROOT,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            threading.Event().wait(delay_s)
            child.kill()
        for slot in range(SLOTS):
            header = os.pread(pair.fd, 32, slot * SLOT_BYTES)
            magic, _, epoch, sequence, length = struct.unpack("=IIQQQ", header)
            try:
                payload = pair.reader.read(ArenaRef(slot, sequence, length))
            except DescriptorError:
                continue
            assert (magic, epoch) == (arena._MAGIC, EPOCH)
            assert payload == bytes([sequence % 251]) * (4 + sequence * 37 % 8000)


def test_pixels_take_slots_in_a_row_behind_those_of_tokens() -> None:
    slots, slot_bytes, num_token_slots = arena.geometry(8192, 200_000)
    fd = arena.create_fd(slots, slot_bytes)
    writer, reader = Arena(fd, slots, slot_bytes, EPOCH, num_token_slots), ArenaReader(fd, slots, slot_bytes, EPOCH)
    pixels = [os.urandom(200_000) for _ in range(16)]
    assert writer.has_room(map(len, pixels))
    refs = [writer.write_pixels(each) for each in pixels]
    assert [bytes(reader.read_pixels(ref)) for ref in refs] == pixels
    assert not writer.has_room([1])
    assert writer.has_room([200_000] * 16, when_empty=True)
    with pytest.raises(ArenaFull):
        writer.write_pixels(b"abcd")
    assert reader.read(writer.write(b"abcd")) == b"abcd"
    before = os.fstat(fd).st_blocks
    for ref in (refs[3], refs[5]):
        assert writer.free(ref)
    assert os.fstat(fd).st_blocks <= before - 2 * 200_000 // 512  # the memory is given back
    with pytest.raises(DescriptorError, match="does not hold payload 3"):
        reader.read_pixels(refs[3])
    assert writer.has_room([200_000, 200_000])
    assert not writer.has_room([400_000])  # the free slots are not in a row
    writer.close()
    reader.close()
    with pytest.raises(DescriptorError):
        reader.read_pixels(refs[0])
    os.close(fd)


@pytest.mark.parametrize("num_tokens", [1, 4096, 4097, 32768, 131072, 1 << 20])
def test_slot_holds_a_full_context(num_tokens: int) -> None:
    slots, slot_bytes, _ = arena.geometry(num_tokens)
    assert slots >= 1
    assert slot_bytes % 4096 == 0
    if num_tokens > 4096:
        assert slot_bytes >= 4 * num_tokens + 32


def test_arena_cannot_be_resized(pair: Pair) -> None:
    for size in (0, SLOT_BYTES, 10 * SLOTS * SLOT_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(pair.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pair.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
