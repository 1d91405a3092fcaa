"""Builds steps for a forward pass and runs them: the part of the engine that the contract suite needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import (
    FROM_EMBEDDINGS,
    NO_ADAPTER,
    DeviceRows,
    EmbeddedTokens,
    IBatchedForwardPass,
    PooledRows,
    SamplingParams,
    ScoredTokens,
    SlotInit,
    StepBatch,
    TokenLogprobs,
)
from penstock.backend.forward_pass.extensions import read_host_logits

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int32]

NUM_PAGES = 256
"""Pages of each group of layers."""
NOT_ITS_OWN = NUM_PAGES - 1
NUM_CHECKPOINTS = 3
MAX_RUNNING = 20
MAX_BATCH_TOKENS = 512
GREEDY = SamplingParams(temperature=0.0)
_PAGE_SIZE = 4
"""Page size of passes that take any; small, so that sequences have many pages."""
TOLERANCE = 1e-3


def page_size_of(forward_pass: IBatchedForwardPass) -> int:
    return min(forward_pass.spec.page_sizes, default=_PAGE_SIZE)


def page_sets(num_groups: int) -> Ints:
    """[NUM_PAGES, num_groups] the pages of each set. Numbers of sets are those of pages if there is one group."""
    num_pages = NUM_PAGES * num_groups
    order = np.arange(num_pages) if num_groups == 1 else np.random.default_rng(1).permutation(num_pages)
    return order.reshape(NUM_PAGES, num_groups).astype(np.int32)


def is_same(a: Floats, b: Floats) -> bool:
    """Two rows of logits are equal up to rounding, and greedy sampling takes the same token."""
    return bool(np.abs(a - b).max() <= TOLERANCE and a.argmax() == b.argmax())


@dataclass
class RowsOnHost:
    """`EmbeddingRows` in an array of the host."""

    values: Floats
    device_reads = False

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def read(self) -> Floats:
        return self.values.copy()

    def copy_to(self, there: DeviceRows) -> None:
        raise TypeError(f"these rows are on the host: call read() instead of copying them to {there}")


@dataclass
class PlacesInMemory:
    """`PagePlaces` in arrays. The last one is for a checkpoint."""

    memory: list[NDArray[np.uint8]]

    @property
    def num_places(self) -> int:
        return len(self.memory) - 1

    def place(self, index: int) -> NDArray[np.uint8]:
        return self.memory[index]

    def note_written(self, index: int) -> None:
        """Nobody reads it later."""


@dataclass
class StepRow:
    """One row of a step: token_ids from position `start` on, in a sequence that has these pages and this slot."""

    token_ids: list[int]
    start: int
    pages: list[int]
    """Numbers of sets: each has one page of each group of layers."""
    slot: int
    has_logits: bool = True
    init: SlotInit | None = None
    embeddings: Floats | None = None
    """Embeddings of all token_ids, which are then FROM_EMBEDDINGS."""
    next_ids: list[int] = field(default_factory=list)
    """The tokens that follow each of the first of token_ids: these are scored."""
    pooled: tuple[str, int] | None = None
    """Kind of the vector that the row completes, and the position of a second text."""
    passed: tuple[int, ...] = ()
    """By group, the first pages that are behind the window; pages of set NOT_ITS_OWN replace them."""
    adapter: int = NO_ADAPTER
    num_drafts: int = 0
    """How many of the last token_ids are drafts."""


@dataclass
class StepRunner:
    """Runs steps of one forward pass, with random prompts and pages."""

    forward_pass: IBatchedForwardPass
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_top: int = 3
    """Top log probabilities of scored tokens."""
    scored: TokenLogprobs | None = None
    """`StepOutput.scored` of the last step."""
    logprobs: TokenLogprobs | None = None
    """`StepOutput.logprobs` of the last step; its rows are those that have logits, decode rows first."""
    num_accepted: tuple[int, ...] = ()
    """`StepOutput.num_accepted` of the last step, in the same order."""

    @property
    def num_groups(self) -> int:
        return len(self.forward_pass.spec.kv_windows)

    def random_pages(self, num_tokens: int) -> list[int]:
        """Pages for num_tokens, in random order; two calls may return the same page."""
        num_pages = -(-num_tokens // page_size_of(self.forward_pass))
        return [int(page) for page in self.rng.permutation(NUM_PAGES)[:num_pages]]

    def random_prompt(self, num_tokens: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.forward_pass.spec.vocab_size, num_tokens)]

    def step(
        self,
        rows: list[StepRow],
        page_copies: tuple[tuple[int, int], ...] = (),
        page_restores: tuple[tuple[int, int], ...] = (),
        state_restores: tuple[tuple[int, int], ...] = (),
        state_saves: tuple[tuple[int, int], ...] = (),
    ) -> tuple[Floats, Ints]:
        """Logits and sampled tokens of the rows that have logits, in the order of `rows`."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].token_ids) > 1)
        ordered = [rows[index] for index in order]
        batch = _make_batch(ordered, page_copies, page_restores, self.num_top, self.num_groups)
        batch = replace(batch, state_restores=state_restores, state_saves=state_saves)
        handle = self.forward_pass.forward(batch)
        logits = np.array(read_host_logits(self.forward_pass, handle), np.float32)
        output = self.forward_pass.sample(handle, batch).wait()
        self.scored, self.logprobs, tokens = output.scored, output.logprobs, np.array(output.token_ids)
        self.num_accepted = output.num_accepted
        logits = logits[: len(batch.logit_rows)]
        back = np.argsort([order[row] for row in batch.logit_rows])
        return logits[back], tokens[back]

    def pool(self, rows: list[StepRow]) -> list[Floats]:
        """Run a step without logits. The vectors of the rows that complete one, in the order of `rows`."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].token_ids) > 1)
        batch = _make_batch([rows[index] for index in order], (), (), self.num_top, self.num_groups)
        handle = self.forward_pass.forward(batch)
        if batch.pooled is None:
            if self.forward_pass.spec.runs_ahead:
                self.forward_pass.sample(handle, batch).wait()
            return []
        vectors = self.forward_pass.sample(handle, batch).wait().pooled or ()
        found = dict(zip([order[row] for row in batch.pooled.rows], vectors, strict=True))
        return [np.array(found[index]) for index in sorted(found)]

    def prefill(
        self, prompt: list[int], pages: list[int], slot: int = 0, chunk: int = 10**6, sampling: SamplingParams = GREEDY
    ) -> tuple[Floats, int]:
        """Logits of the prompt's last token, [V], and the token sampled from them. chunk is the most tokens a step."""
        init = SlotInit(slot, sampling, np.array(prompt, np.int32), len(prompt))
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            is_last = start + chunk >= len(prompt)
            logits, tokens = self.step([StepRow(part, start, pages, slot, is_last, init if start == 0 else None)])
        return logits[0], int(tokens[0])

    def prefill_embeddings(self, embeddings: Floats, pages: list[int], chunk: int) -> Floats:
        """The same as `prefill` for a prompt of embeddings, in slot 0."""
        init: SlotInit | None = SlotInit(
            0, GREEDY, np.full(len(embeddings), FROM_EMBEDDINGS, np.int32), len(embeddings)
        )
        for start in range(0, len(embeddings), chunk):
            part = embeddings[start : start + chunk]
            is_last = start + chunk >= len(embeddings)
            logits, _ = self.step([StepRow([FROM_EMBEDDINGS] * len(part), start, pages, 0, is_last, init, part)])
            init = None
        last: Floats = logits[0]
        return last


def _make_batch(
    rows: list[StepRow],
    page_copies: tuple[tuple[int, int], ...],
    page_restores: tuple[tuple[int, int], ...],
    num_top: int,
    num_groups: int,
) -> StepBatch:
    """rows of one token come first."""
    lengths = [len(row.token_ids) for row in rows]
    return StepBatch(
        input_ids=np.array([token for row in rows for token in row.token_ids], np.int32),
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_lens=np.array([row.start for row in rows], np.int32),
        page_table=_page_table(rows, num_groups),
        slots=np.array([row.slot for row in rows], np.int32),
        logit_rows=np.array([index for index, row in enumerate(rows) if row.has_logits], np.int32),
        slot_inits=tuple(row.init for row in rows if row.init),
        page_copies=page_copies,
        page_restores=page_restores,
        embeddings=tuple(
            EmbeddedTokens(sum(lengths[:index]), RowsOnHost(row.embeddings))
            for index, row in enumerate(rows)
            if row.embeddings is not None
        ),
        scored=_scored_tokens(rows, num_top),
        pooled=_pooled_rows(rows),
        adapters=_adapters(rows),
        drafts=_num_drafts(rows),
    )


def _num_drafts(rows: list[StepRow]) -> Ints | None:
    num_drafts = [row.num_drafts for row in rows if row.has_logits]
    return np.array(num_drafts, np.int32) if any(num_drafts) else None


def _adapters(rows: list[StepRow]) -> Ints | None:
    adapters = [row.adapter for row in rows]
    return None if max(adapters) == NO_ADAPTER else np.array(adapters, np.int32)


def _page_table(rows: list[StepRow], num_groups: int) -> Ints:
    """See `StepBatch`."""
    sets = page_sets(num_groups)
    table = np.zeros((len(rows), max(len(row.pages) for row in rows), num_groups), np.int32)
    for index, row in enumerate(rows):
        if row.pages:
            table[index, : len(row.pages)] = sets[row.pages]
        for group, num_passed in enumerate(row.passed):
            table[index, :num_passed, group] = sets[NOT_ITS_OWN, group]
    return table if num_groups > 1 else table[:, :, 0]


def _pooled_rows(rows: list[StepRow]) -> PooledRows | None:
    pooled = [(index, *row.pooled) for index, row in enumerate(rows) if row.pooled is not None]
    if not pooled:
        return None
    indices, kinds, second_starts = zip(*pooled, strict=True)
    return PooledRows(np.array(indices, np.int32), kinds, np.array(second_starts, np.int32))


def _scored_tokens(rows: list[StepRow], num_top: int) -> ScoredTokens | None:
    tokens: list[int] = []
    next_ids: list[int] = []
    first = 0
    for row in rows:
        tokens += range(first, first + len(row.next_ids))
        next_ids += row.next_ids
        first += len(row.token_ids)
    return ScoredTokens(np.array(tokens, np.int32), np.array(next_ids, np.int32), num_top) if tokens else None
