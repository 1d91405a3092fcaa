"""Rows of a plan → the arrays of a StepBatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backend.forward_pass import FROM_SLOT, SlotInit, StepBatch

if TYPE_CHECKING:
    from backend.scheduler import Row


class BatchBuilder:
    """Keeps the page table of all slots between steps, so that a step writes only the pages it adds."""

    def __init__(self, max_running: int, max_pages_per_sequence: int) -> None:
        self._page_table = np.zeros((max_running, max_pages_per_sequence), np.int32)
        self._num_pages = [0] * max_running

    def build(self, rows: list[Row]) -> StepBatch:
        """Arrays for rows, which come in the order that `StepBatch` promises; later steps do not change them."""
        slots: list[int] = []
        query_starts = [0]
        input_ids: list[int] = []
        logit_rows: list[int] = []
        slot_inits: list[SlotInit] = []
        widest = 1
        for index, row in enumerate(rows):
            sequence = row.sequence
            slot = sequence.slot
            if slot is None:
                raise RuntimeError("a planned sequence has no slot; this is a bug")
            slots.append(slot)
            if row.takes_slot:
                # A former owner's pages.
                self._page_table[slot, : self._num_pages[slot]] = 0
                self._num_pages[slot] = 0
                tokens = np.array(sequence.tokens, np.int32)
                slot_inits.append(SlotInit(slot, sequence.sampling, tokens, sequence.num_prompt_tokens))
            pages = sequence.pages
            num_pages = len(pages)
            if (known := self._num_pages[slot]) < num_pages:
                self._page_table[slot, known:num_pages] = pages[known:]
                self._num_pages[slot] = num_pages
            if num_pages > widest:
                widest = num_pages
            end = row.start + row.num_tokens
            if end > len(sequence.tokens):
                input_ids.append(FROM_SLOT)
            else:
                input_ids.extend(sequence.tokens[row.start : end])
            query_starts.append(len(input_ids))
            if row.samples:
                logit_rows.append(index)
        slot_ids = np.array(slots, np.int32)
        return StepBatch(
            input_ids=np.array(input_ids, np.int32),
            query_starts=np.array(query_starts, np.int32),
            context_lens=np.array([row.start for row in rows], np.int32),
            page_table=self._page_table[slot_ids, :widest],
            slots=slot_ids,
            logit_rows=np.array(logit_rows, np.int32),
            slot_inits=tuple(slot_inits),
        )


def keep_rows(batch: StepBatch, kept: list[int]) -> StepBatch:
    """The batch with only the rows of these ascending indices: late binding, when others ended since the plan."""
    rows = np.array(kept, np.int64)
    lengths = np.diff(batch.query_starts)
    token_kept = np.repeat(np.isin(np.arange(batch.num_rows), rows), lengths)
    new_index = np.full(batch.num_rows, -1, np.int32)
    new_index[rows] = np.arange(len(rows))
    logit_rows = new_index[batch.logit_rows]
    slots = batch.slots[rows]
    return StepBatch(
        input_ids=batch.input_ids[token_kept],
        query_starts=np.concatenate([[0], np.cumsum(lengths[rows])]).astype(np.int32),
        context_lens=batch.context_lens[rows],
        page_table=batch.page_table[rows],
        slots=slots,
        logit_rows=logit_rows[logit_rows >= 0],
        slot_inits=tuple(init for init in batch.slot_inits if init.slot in slots),
    )
