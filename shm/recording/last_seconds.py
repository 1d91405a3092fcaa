"""Reads the end of a ring, from a place at which a reader can begin."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.shm.recording.records import Kind, unpack
from penstock.shm.recording.steps import IS_KEY

if TYPE_CHECKING:
    from penstock.shm.memory.ring import RingReader, Stretch


def read_last(ring: RingReader, seconds: float) -> Stretch:
    """Return at least the records of the given seconds before the last record, if there are that many.

    The first record is the note of the backend that wrote them; the next is a key plan.
    """
    stretch = ring.read()
    if not stretch.records:
        return stretch
    since_s = unpack(stretch.records[-1]).time_s - seconds
    first = 0
    for index, data in enumerate(stretch.records):
        record = unpack(data)
        if record.time_s >= since_s:
            break
        if record.kind == Kind.PLAN and record.flags & IS_KEY:
            first = index
    note = ring.read_note()
    return replace(stretch, records=[*([note] if note else []), *stretch.records[first:]])
