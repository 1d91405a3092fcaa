"""Records written once per step: its plan and its result, and the rows of each plan. Fixed fields, then columns of
integers.

A plan's decoding rows compute one token each. They come first, and are left out if they equal those of the plan before.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.shm.recording.records import ALIGNMENT, FRAME, Kind, pack, padding

HAS_DECODES = 1
"""Flag of a plan: a column of the decoding rows' slots is present."""
IS_KEY = 2
"""Flag of a plan with decoding rows: columns of all rows' ends and of their sequences follow. Readers begin here."""
OMITS_ROWS = 4
"""Flag of a plan with more than MAX_ROWS rows: it has no columns, and neither has its result."""
MAX_ROWS = 2048
FAILED = 1
"""Flag of a result."""

_PLAN = struct.Struct("<QddddIIIIIIII")
_RESULT = struct.Struct("<QddIIII")
_TOKENS = struct.Struct("<QII")  # step, number of tokens, 0

PLAN_HEAD = struct.Struct(FRAME.format + _PLAN.format[1:])
"""The fields that the loop packs together with the frame.

They are: step; begin of the turn that planned it; end of the turn before; end and duration of an earlier step; number
of results before this plan, which includes that step's if it is not 0; rows that decode; other rows; tokens; sequences
that run and that wait, and pages held and idle, after the turn before.
"""
RESULT_HEAD = struct.Struct(FRAME.format + _RESULT.format[1:])
"""The frame, and: step; when it ended, or 0; seconds that it took; rows that ran; tokens; rows that were dropped; 0."""


class PlanRecord(NamedTuple):
    """A step's plan. Columns are 32 bits wide, except the sequences' 64."""

    step: int
    turn_began_s: float
    last_turn_ended_s: float
    result_ended_s: float
    result_step_s: float
    num_results: int
    """If not 0, step num_results - 1 has ended at result_ended_s, after result_step_s, and all its rows ran. It has no
    record of its own."""
    num_decodes: int
    num_chunks: int
    num_tokens: int
    num_running: int
    num_waiting: int
    pages_held: int
    pages_idle: int
    decode_slots: array[int] | None
    """None if they are the same as in the plan before."""
    chunk_slots: array[int]
    """Slots of the other rows."""
    chunk_lengths: array[int]
    chunk_ends: array[int]
    """Tokens of the other rows' sequences that are computed after the step."""
    ends: array[int] | None
    """The same for all rows; None except in a key plan."""
    sequences: array[int] | None
    """Numbers of all rows' sequences; None except in a key plan."""
    omits_rows: bool


class ResultRecord(NamedTuple):
    step: int
    ended_s: float
    step_s: float
    num_rows: int
    num_tokens: int
    dropped_slots: array[int]
    """Rows that were planned and did not run, because their sequence had ended or was preempted."""
    is_failed: bool


class TokensRecord(NamedTuple):
    step: int
    slots: array[int]
    """A slot occurs once for each of its tokens."""
    token_ids: array[int]


def pack_column(values: Sequence[int | None]) -> bytes:
    """32 bits each; -1 for None."""
    return array("i", [-1 if value is None else value for value in values]).tobytes()


def pack_chunks(slots: Sequence[int | None], lengths: Sequence[int], ends: Sequence[int]) -> bytes:
    return pack_column(slots) + pack_column(lengths) + pack_column(ends)


def pack_key(num_bytes: int, ends: Sequence[int], sequences: Iterable[int]) -> bytes:
    """num_bytes of columns come before it."""
    columns = padding(num_bytes) + pack_column(ends)
    columns += padding(num_bytes + len(columns))
    return columns + array("q", sequences).tobytes()


def pack_tokens(step: int, time_s: float, slots: Sequence[int | None], token_ids: Sequence[int]) -> bytes:
    columns = pack_column(slots) + pack_column(token_ids)
    return pack(Kind.TOKENS, time_s, _TOKENS.pack(step, len(token_ids), 0) + columns)


def unpack_plan(flags: int, body: bytes) -> PlanRecord:
    """Raises ValueError."""
    reader = _Reader(_PLAN, body, "a plan")
    num_decodes, num_chunks = reader.fields[6:8]
    num_rows, is_key = num_decodes + num_chunks, bool(flags & IS_KEY)
    decode_slots = reader.column("i", num_decodes) if flags & HAS_DECODES else None
    chunks = [reader.column("i", 0 if flags & OMITS_ROWS else num_chunks) for _ in range(3)]
    ends = reader.aligned("i", num_rows) if is_key else None
    sequences = reader.aligned("q", num_rows) if is_key else None
    return PlanRecord._make((*reader.fields, decode_slots, *chunks, ends, sequences, bool(flags & OMITS_ROWS)))


def unpack_result(flags: int, body: bytes) -> ResultRecord:
    """Raises ValueError."""
    reader = _Reader(_RESULT, body, "a result")
    *fields, num_dropped, _ = reader.fields
    dropped = reader.column("i", 0 if flags & OMITS_ROWS else num_dropped)
    return ResultRecord._make((*fields, dropped, bool(flags & FAILED)))


def unpack_tokens(body: bytes) -> TokensRecord:
    """Raises ValueError."""
    reader = _Reader(_TOKENS, body, "the tokens of a step")
    step, count, _ = reader.fields
    return TokensRecord(step, reader.column("i", count), reader.column("i", count))


class _Reader:
    def __init__(self, layout: struct.Struct, body: bytes, what: str) -> None:
        """Raises ValueError."""
        if len(body) < layout.size:
            raise ValueError(f"{what} has {len(body)} bytes, fewer than {layout.size}")
        self.fields: tuple[Any, ...] = layout.unpack_from(body)
        self._body = body
        self._first = self._place = layout.size
        self._what = what

    def column(self, code: str, count: int) -> array[int]:
        column = array(code)
        end = self._place + count * column.itemsize
        if end > len(self._body):
            raise ValueError(f"{self._what} is cut off in a column of {count} rows")
        column.frombytes(self._body[self._place : end])
        self._place = end
        return column

    def aligned(self, code: str, count: int) -> array[int]:
        self._place += (self._first - self._place) % ALIGNMENT
        return self.column(code, count)


class Row(NamedTuple):
    slot: int
    sequence: int
    """Its number, or -1 if it is not known."""
    end: int
    """Tokens that are computed after the step; -1 if they are not known."""
    length: int


class RowTracker:
    """Follows the plans and starts of one backend in their order."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Records are missing: rows are unknown until the next key plan."""
        self._decode_slots: list[int] | None = None
        self._sequences: dict[int, int] = {}  # by slot
        self._ends: dict[int, int] = {}

    def note_start(self, slot: int, sequence: int) -> None:
        self._sequences[slot] = sequence

    def rows(self, plan: PlanRecord) -> list[Row] | None:
        """The plan's rows, decoding rows first; None if they are not known."""
        if plan.omits_rows:
            self.forget()
            return None
        if plan.decode_slots is not None:
            self._decode_slots = list(plan.decode_slots)
        if self._decode_slots is None or len(self._decode_slots) != plan.num_decodes:
            return None
        slots = [*self._decode_slots, *plan.chunk_slots]
        lengths = [*[1] * plan.num_decodes, *plan.chunk_lengths]
        if plan.sequences is not None and plan.ends is not None:
            self._sequences.update(zip(slots, plan.sequences, strict=True))
            ends = list(plan.ends)
        else:
            ends = [self._ends[slot] + 1 if slot in self._ends else -1 for slot in self._decode_slots]
            ends += plan.chunk_ends
        self._ends.update((slot, end) for slot, end in zip(slots, ends, strict=True) if end >= 0)
        return [
            Row(slot, self._sequences.get(slot, -1), end, length)
            for slot, end, length in zip(slots, ends, lengths, strict=True)
        ]
