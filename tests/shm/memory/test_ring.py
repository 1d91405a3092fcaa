"""The ring: a reader sees whole records without gaps, or knows that some are missing."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shm.memory import region, ring
from penstock.shm.memory.ring import BLOCK_BYTES, MAX_NOTE_BYTES, MIN_RING_BYTES, RingReader, RingWriter


def make_record(number: int, num_bytes: int) -> bytes:
    """A record of num_bytes, a multiple of 8, whose words are its number."""
    return struct.pack("<II", num_bytes, number) + struct.pack("<I", number) * ((num_bytes - 8) // 4)


def numbers(records: list[bytes]) -> list[int]:
    found = []
    for record in records:
        length, number = struct.unpack_from("<II", record)
        assert record == make_record(number, length)
        found.append(number)
    return found


@pytest.fixture
def ring_fd() -> Iterator[int]:
    fd = ring.create_fd(MIN_RING_BYTES)
    yield fd
    os.close(fd)


lengths = st.one_of(st.integers(1, 40), st.integers(1, BLOCK_BYTES // 8), st.just(BLOCK_BYTES // 8)).map(
    lambda n: 8 * n
)


@given(rounds=st.lists(st.tuples(st.lists(lengths, max_size=12), st.booleans()), max_size=12))
def test_reader_gets_every_record_that_fits_and_writers_follow_each_other(
    rounds: list[tuple[list[int], bool]],
) -> None:
    fd = ring.create_fd(MIN_RING_BYTES)
    writer, reader = RingWriter(fd), RingReader(fd)
    written, end = 0, 0
    for its_lengths, restarts in rounds:
        for length in its_lengths:
            writer.append(make_record(written, length))
            written += 1
        new = reader.read(end)
        assert new.end == reader.written
        found = numbers(new.records)
        assert found == list(range(written - len(found), written))
        if new.begin == end:
            assert len(found) == len(its_lengths)
        else:  # more than the ring keeps
            assert new.end - end > MIN_RING_BYTES - 4 * BLOCK_BYTES
        everything = numbers(reader.read().records)
        assert everything == list(range(written - len(everything), written))
        assert len(everything) >= len(found)
        end = new.end
        if restarts:
            writer.close()
            writer = RingWriter(fd)
    writer.close()
    reader.close()
    os.close(fd)


def test_records_that_are_read_while_others_are_written_are_whole(ring_fd: int) -> None:
    num_records = 20_000
    writer, reader = RingWriter(ring_fd), RingReader(ring_fd)

    def write() -> None:
        for number in range(num_records):
            writer.append(make_record(number, 8 * (1 + number * number % 200)))

    thread = threading.Thread(target=write)
    thread.start()
    last, end = -1, 0
    while last < num_records - 1:
        stretch = reader.read(end)
        if found := numbers(stretch.records):
            assert found == list(range(found[0], found[0] + len(found)))
            assert found[0] > last
            assert stretch.begin > end or found[0] == last + 1
            last = found[-1]
        end = stretch.end
    thread.join()
    writer.close()
    reader.close()


def test_reader_drops_what_is_overwritten_while_it_copies(ring_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = RingWriter(ring_fd), RingReader(ring_fd)
    for number in range(100):
        writer.append(make_record(number, 4096))
    copy = reader._copy

    def copy_slowly(begin: int, end: int) -> bytes:
        for number in range(100, 180):
            writer.append(make_record(number, 4096))
        return copy(begin, end)

    monkeypatch.setattr(reader, "_copy", copy_slowly)
    stretch = reader.read()
    found = numbers(stretch.records)
    assert found
    assert found == list(range(found[0], 100))
    assert stretch.begin == found[0] * 4096
    writer.close()
    reader.close()


def test_note_is_replaced_and_never_overwritten_by_records(ring_fd: int) -> None:
    writer, reader = RingWriter(ring_fd), RingReader(ring_fd)
    assert reader.read_note() == b""
    for note in (b"first", b"x" * MAX_NOTE_BYTES, b"last"):
        writer.write_note(note)
        for number in range(20):
            writer.append(make_record(number, BLOCK_BYTES))
        assert reader.read_note() == note
    with pytest.raises(ValueError, match=f"there is room for {MAX_NOTE_BYTES}"):
        writer.write_note(bytes(MAX_NOTE_BYTES + 1))
    writer.close()
    reader.close()


def test_other_memory_and_other_sizes_are_refused(ring_fd: int) -> None:
    with pytest.raises(ValueError, match="the smallest has"):
        ring.create_fd(MIN_RING_BYTES - 1)
    other = region.create("t", 1 << 20)
    region.seal(other)
    with pytest.raises(region.RegionError, match="not a ring"):
        RingReader(other)
    os.pwrite(other, os.pread(ring_fd, 24, 0).replace(struct.pack("<Q", MIN_RING_BYTES), struct.pack("<Q", 1 << 30)), 0)
    with pytest.raises(region.RegionError, match="expected"):
        RingReader(other)
    os.close(other)
