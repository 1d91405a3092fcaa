"""The states of a pass's slots, and checkpoints of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.backend.scheduling.drafting import MAX_STATE_DRAFTS
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch


@dataclass
class States:
    """A state is the number of a sequence's tokens so far, and the cell after them. A pass with state goes on there."""

    num_checkpoints: int | None
    """None for a pass without states."""
    page_size: int
    root: int
    of_slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Those that were saved."""

    def restore(self, batch: StepBatch) -> None:
        if not {slot for _, slot in batch.state_restores} <= {init.slot for init in batch.slot_inits}:
            raise Violation("a state is restored to a slot whose sequence does not begin")
        for checkpoint, slot in batch.state_restores:
            if checkpoint not in self.checkpoints:
                raise Violation("a checkpoint is restored that was not saved")
            self.of_slots[slot] = self.checkpoints[checkpoint]

    def check(self, slot: int, position: int, cell_in_pages: int, *, is_spoiled: bool) -> int:
        """Return the cell before the position. It is in the pages as well, unless the device has spoiled them, or has
        poisoned what one sequence computed and another has computed too."""
        num_tokens, cell = self.of_slots.get(slot, (0, self.root))
        if num_tokens != position:
            raise Violation(f"a row begins at {position}; its slot's state is that after {num_tokens} tokens")
        if is_spoiled or cell == cell_in_pages:
            return cell
        if (poisoned := min(cell, cell_in_pages)) >= 0:
            raise Violation("a slot's state is not that after the tokens in its pages")
        return poisoned

    def save(self, batch: StepBatch) -> None:
        places = [checkpoint for _, checkpoint in batch.state_saves]
        if len(set(places)) != len(places) or not set(places) <= set(range(self.num_checkpoints or 0)):
            raise Violation(f"states are saved to the checkpoints {places} of {self.num_checkpoints}")
        saved = {slot for slot, _ in batch.state_saves}
        if not saved <= set(batch.slots.tolist()):
            raise Violation("a state is saved of a slot that has no row")
        if self.num_checkpoints is not None and batch.drafts is not None and batch.drafts.sum() > MAX_STATE_DRAFTS:
            raise Violation(f"{batch.drafts.sum()} drafts; {MAX_STATE_DRAFTS} states can be kept")
        if batch.drafts is not None and not saved.isdisjoint(batch.slots[batch.logit_rows[batch.drafts > 0]].tolist()):
            raise Violation("a state is saved that drafts may have changed")
        for slot, checkpoint in batch.state_saves:
            if self.of_slots[slot][0] % self.page_size:
                raise Violation("a checkpoint is not at the end of a page")
            self.checkpoints[checkpoint] = self.of_slots[slot]

    def go_back(self, slot: int, num_rejected: int, written: list[int]) -> None:
        """Undo the last tokens of a step. written: the cells after its tokens."""
        num_tokens, _ = self.of_slots[slot]
        self.of_slots[slot] = num_tokens - num_rejected, written[-1 - num_rejected]
