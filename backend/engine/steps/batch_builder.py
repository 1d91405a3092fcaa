"""Builds the arrays of a StepBatch from a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.backend.buffers import SharedPromptRows
from penstock.backend.forward_pass import (
    FROM_SLOT,
    NO_ADAPTER,
    EmbeddedTokens,
    PooledRows,
    ScoredTokens,
    SlotInit,
    StepBatch,
)
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.pictures import without_picture_ids
from penstock.backend.sequences.sequence import Sequence


class WholeBatchBuilder:
    """Builds steps of whole sequences, which have no pages."""

    def build(self, plan: Plan) -> StepBatch:
        """The plan as arrays."""
        num_rows = len(plan)
        query_starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(_column(plan.lengths), out=query_starts[1:])
        tokens = b"".join([sequence.tokens.tobytes() for sequence in plan.sequences])
        return StepBatch(
            input_ids=np.frombuffer(tokens, np.int32),
            query_starts=query_starts,
            context_lens=np.zeros(num_rows, np.int32),
            page_table=np.zeros((num_rows, 0), np.int32),
            slots=_column(plan.slots),
            logit_rows=np.zeros(0, np.int32),
            pooled=_pooled_rows(plan),
        )


class BatchBuilder:
    """Keeps the page table of all slots between steps: a step writes only the pages that it adds."""

    def __init__(
        self,
        max_running: int,
        max_pages_per_sequence: int,
        num_groups: int = 1,
        *,
        has_adapters: bool = False,
        has_picture_axes: bool = False,
    ) -> None:
        """max_pages_per_sequence counts the pages of all groups."""
        self._has_picture_axes = has_picture_axes
        self._adapters = np.full(max_running, NO_ADAPTER, np.int32) if has_adapters else None
        self._page_table = np.zeros((max_running, max_pages_per_sequence), np.int32)
        self._num_groups = num_groups
        self._num_pages = np.zeros(max_running, np.int32)
        self._counting = np.arange(max_running + 1, dtype=np.int32)
        self._from_slot = np.full(max_running, FROM_SLOT, np.int32)

    def build(self, plan: Plan) -> StepBatch:
        """The plan as arrays. Later steps do not change them."""
        for sequence in plan.slot_init_sequences:
            self._clear(sequence)  # the slot's previous sequence
            self._add_pages(sequence)
            if self._adapters is not None:
                self._adapters[sequence.slot] = sequence.adapter
        for sequence in plan.grown:
            self._add_pages(sequence)
        if plan.num_decodes == len(plan):
            return self._build_decodes(plan)
        slots = _column(plan.slots)
        drafts = [plan.drafts.get(sequence, []) for sequence in plan.sequences] if plan.drafts else []
        num_drafts = _column([len(tokens) for tokens in drafts] or [0] * len(plan))
        lengths = _column(plan.lengths) + num_drafts
        query_starts = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        input_ids = np.full(query_starts[-1], FROM_SLOT, np.int32)
        embeddings: list[EmbeddedTokens] = []
        spans: list[tuple[int, int, int]] = []
        for index in range(plan.num_decodes, len(plan)):
            sequence, end = plan.sequences[index], plan.ends[index]
            if drafts and drafts[index]:
                input_ids[query_starts[index] + 1 : query_starts[index + 1]] = drafts[index]
                continue
            start = end - plan.lengths[index]
            input_ids[query_starts[index] : query_starts[index + 1]] = sequence.tokens[start:end]
            if sequence.pictures is not None:
                for token, values, span_end in sequence.pictures.rows_of(start, end):
                    first = int(query_starts[index]) + token - start
                    embeddings.append(EmbeddedTokens(first, values))
                    if sequence.pictures.sees_whole:
                        spans.append((first, first + values.num_rows, span_end))
            if sequence.embeddings is not None and start < sequence.num_prompt_tokens:
                rows = SharedPromptRows(sequence.embeddings, start, min(end, sequence.num_prompt_tokens) - start)
                embeddings.append(EmbeddedTokens(int(query_starts[index]), rows))
        context_lens = _column(plan.ends) + num_drafts - lengths
        return StepBatch(
            input_ids=without_picture_ids(input_ids) if embeddings else input_ids,
            query_starts=query_starts,
            context_lens=context_lens,
            page_table=self._pages_of(slots),
            slots=slots,
            logit_rows=_column(plan.logit_rows),
            slot_inits=tuple(map(_slot_init, plan.slot_init_sequences)),
            page_copies=tuple(plan.page_copies.values()),
            page_restores=tuple(chain.from_iterable(plan.page_restores.values())),
            state_restores=tuple(plan.state_restores.values()),
            state_saves=tuple(plan.state_saves.values()),
            embeddings=tuple(embeddings),
            scored=_scored_tokens(plan, query_starts) if plan.scored else None,
            pooled=_pooled_rows(plan) if plan.pooled_rows else None,
            rope_positions=self._rope_positions(plan, query_starts, context_lens),
            adapters=self._adapters_of(slots),
            drafts=num_drafts[plan.logit_rows] if drafts else None,
            visible_ends=_visible_ends(query_starts, context_lens, spans) if spans else None,
        )

    def _build_decodes(self, plan: Plan) -> StepBatch:
        """`build` for the most frequent plan: each row computes one generated token."""
        slots, num_rows = _column(plan.slots), len(plan)
        query_starts, context_lens = self._counting[: num_rows + 1].copy(), _column(plan.ends) - np.int32(1)
        return StepBatch(
            input_ids=self._from_slot[:num_rows].copy(),
            query_starts=query_starts,
            context_lens=context_lens,
            page_table=self._pages_of(slots),
            slots=slots,
            logit_rows=self._counting[:num_rows].copy(),
            page_copies=tuple(plan.page_copies.values()),
            page_restores=tuple(chain.from_iterable(plan.page_restores.values())),
            state_saves=tuple(plan.state_saves.values()),
            rope_positions=self._rope_positions(plan, query_starts, context_lens),
            adapters=self._adapters_of(slots),
        )

    def _rope_positions(
        self, plan: Plan, query_starts: NDArray[np.int32], context_lens: NDArray[np.int32]
    ) -> NDArray[np.int32] | None:
        if not self._has_picture_axes or all(sequence.pictures is None for sequence in plan.sequences):
            return None
        pictures = [sequence.pictures for sequence in plan.sequences]
        shifts = _column([0 if each is None else each.shift for each in pictures])
        firsts = np.repeat(context_lens + shifts - query_starts[:-1], np.diff(query_starts))
        positions = np.repeat((firsts + np.arange(len(firsts), dtype=np.int32))[:, None], 3, axis=1)
        for index in range(plan.num_decodes, len(plan)):  # the others are behind their pictures
            if (own := pictures[index]) is not None:
                start, end, first = query_starts[index], query_starts[index + 1], int(context_lens[index])
                positions[start:end] = own.rope_positions(first, first + int(end - start))
        return positions

    def _adapters_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32] | None:
        return None if self._adapters is None else _unless_none(self._adapters[slots])

    def _pages_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        pages: NDArray[np.int32] = self._page_table[slots, : self._num_pages[slots].max()]
        return pages if self._num_groups == 1 else pages.reshape(len(slots), -1, self._num_groups)

    def _clear(self, sequence: Sequence) -> None:
        self._page_table[sequence.slot, : self._num_pages[sequence.slot]] = 0
        self._num_pages[sequence.slot] = 0

    def _add_pages(self, sequence: Sequence) -> None:
        slot, pages = sequence.slot, sequence.kv.pages
        for index in range(self._num_pages[slot], len(pages)):
            self._page_table[slot, index] = pages[index]
        self._num_pages[slot] = len(pages)


def _unless_none(adapters: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """The adapters; None if no row has one."""
    return adapters if len(adapters) and adapters.max() > NO_ADAPTER else None


def _column(values: list[int] | list[int | None]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32, len(values))  # a third quicker than np.array


def _visible_ends(
    query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], spans: list[tuple[int, int, int]]
) -> NDArray[np.int32]:
    """spans: the first token, the token behind the last, and what they see up to."""
    own = np.arange(1, query_starts[-1] + 1, dtype=np.int32)
    ends: NDArray[np.int32] = own + np.repeat(context_lens - query_starts[:-1], np.diff(query_starts))
    for first, end, visible_end in spans:
        ends[first:end] = visible_end
    return ends


def _slot_init(sequence: Sequence) -> SlotInit:
    if sequence.slot is None:
        raise RuntimeError("a planned sequence has no slot; this is a bug")
    tokens = without_picture_ids(np.array(sequence.tokens, np.int32))
    return SlotInit(sequence.slot, sequence.sampling, tokens, sequence.num_prompt_tokens)


def _scored_tokens(plan: Plan, query_starts: NDArray[np.int32]) -> ScoredTokens:
    tokens, next_ids = [], []
    for index in range(plan.num_decodes, len(plan)):
        sequence = plan.sequences[index]
        if (span := plan.scored.get(sequence)) is not None:
            first, end = span
            row_start = plan.ends[index] - plan.lengths[index]
            tokens.append(np.arange(first, end, dtype=np.int32) + (query_starts[index] - row_start))
            next_ids.append(np.array(sequence.tokens[first + 1 : end + 1], np.int32))
    return ScoredTokens(np.concatenate(tokens), np.concatenate(next_ids), _num_top(plan))


def _pooled_rows(plan: Plan) -> PooledRows:
    pooled = [(index, task) for index in plan.pooled_rows if (task := plan.sequences[index].pooled) is not None]
    return PooledRows(
        np.array([index for index, _ in pooled], np.int32),
        tuple(task.kind for _, task in pooled),
        np.array([task.second_start for _, task in pooled], np.int32),
    )


def _num_top(plan: Plan) -> int:
    return max(sequence.num_prompt_logprobs for sequence in plan.scored)


def keep_rows(batch: StepBatch, kept: list[int], plan: Plan) -> StepBatch:
    """Return the batch with only the rows of these ascending indices.

    plan already has only these rows. Used when sequences have ended between planning and launch.
    """
    rows = np.array(kept, np.int64)
    lengths = np.diff(batch.query_starts)
    token_kept = np.repeat(np.isin(np.arange(batch.num_rows), rows), lengths)
    new_position = np.cumsum(token_kept) - 1
    new_index = np.full(batch.num_rows, -1, np.int32)
    new_index[rows] = np.arange(len(rows))
    logit_rows = new_index[batch.logit_rows]
    is_kept = logit_rows >= 0
    slots = batch.slots[rows]
    return StepBatch(
        input_ids=batch.input_ids[token_kept],
        query_starts=np.concatenate([[0], np.cumsum(lengths[rows])]).astype(np.int32),
        context_lens=batch.context_lens[rows],
        page_table=batch.page_table[rows],
        slots=slots,
        logit_rows=logit_rows[is_kept],
        slot_inits=tuple(init for init in batch.slot_inits if init.slot in slots),
        page_copies=tuple(plan.page_copies.values()),
        page_restores=tuple(chain.from_iterable(plan.page_restores.values())),
        state_restores=tuple(plan.state_restores.values()),
        state_saves=tuple(plan.state_saves.values()),
        embeddings=tuple(
            replace(given, first=int(new_position[given.first]))
            for given in batch.embeddings
            if token_kept[given.first]
        ),
        scored=_keep_scored(batch.scored, token_kept, new_position, plan) if batch.scored and plan.scored else None,
        pooled=_pooled_rows(plan) if plan.pooled_rows else None,
        rope_positions=None if batch.rope_positions is None else batch.rope_positions[token_kept],
        adapters=None if batch.adapters is None else _unless_none(batch.adapters[rows]),
        drafts=batch.drafts[is_kept] if batch.drafts is not None and plan.drafts else None,
        visible_ends=None if batch.visible_ends is None else batch.visible_ends[token_kept],
    )


def _keep_scored(
    scored: ScoredTokens, token_kept: NDArray[np.bool_], new_position: NDArray[np.int64], plan: Plan
) -> ScoredTokens:
    kept = token_kept[scored.tokens]
    tokens = new_position[scored.tokens[kept]].astype(np.int32)
    return ScoredTokens(tokens, scored.next_ids[kept], _num_top(plan))
