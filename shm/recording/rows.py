"""Reconstructs the rows of each plan, most of which the plan's record does not repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.shm.recording.steps import PlanRecord


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
