"""A miniature engine: builds StepBatches over its own page table, without the backend's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.forward_pass import (
    FROM_EMBEDDINGS,
    NO_ADAPTER,
    DeviceRows,
    EmbeddedTokens,
    SamplingParams,
    ScoredTokens,
    SlotInit,
    StepBatch,
    TokenLogprobs,
)
from penstock.backend.kv_cache.kv_groups import KvGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import EmbeddingRows

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class RowsOnHost:
    """`EmbeddingRows` in host memory."""

    values: NDArray[np.float32]
    device_reads = False

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def read(self) -> NDArray[np.float32]:
        return self.values.copy()

    def copy_to(self, there: DeviceRows) -> None:
        raise TypeError(f"rows in host memory cannot be copied on the device, to {there}")


@dataclass
class DriverRow:
    """One sequence: its tokens, how many of them are computed, and its pages, set by set (see `KvGroups`)."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    announced: bool = False
    sampling: SamplingParams = GREEDY
    embeddings: NDArray[np.float32] | None = None
    """[num_prompt_tokens, hidden], if the prompt consists of embeddings."""
    is_scored: bool = False
    """Its prompt's tokens are scored."""
    adapter: int = NO_ADAPTER


class Driver:
    """Runs sequences through a pass step by step. Takes pages from the end of `free_pages`, num_pages of each group."""

    def __init__(
        self, forward_pass: Any, num_pages: int, page_size: int, kv_dtype: str = "fp32", seed: int = 0
    ) -> None:
        self.forward_pass = forward_pass
        self.page_size = page_size
        self.num_groups = len(forward_pass.spec.kv_windows)
        num_pages *= self.num_groups
        self.free_pages = np.random.default_rng(seed).permutation(num_pages).tolist()
        self.rows: list[DriverRow] = []
        self.read: Callable[[Any], NDArray[np.float32]] = forward_pass.host_logits
        """Turns the result of `forward` into what `step` returns."""
        self.give: Callable[[NDArray[np.float32]], EmbeddingRows] = RowsOnHost
        """Wraps embeddings for the pass."""
        self.num_top = 3
        """Top log probabilities of scored tokens."""
        self.scores: dict[int, list[TokenLogprobs]] = {}
        """Log probabilities of scored tokens by slot, one entry per token."""
        forward_pass.create_cache(num_pages, page_size, kv_dtype)

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> DriverRow:
        used = {row.slot for row in self.rows}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        row = DriverRow(slot, list(prompt), len(prompt), sampling=sampling)
        self.rows.append(row)
        return row

    def add_embedded(self, embeddings: NDArray[np.float32], sampling: SamplingParams = GREEDY) -> DriverRow:
        row = self.add([FROM_EMBEDDINGS] * len(embeddings), sampling)
        row.embeddings = embeddings
        return row

    def remove(self, row: DriverRow) -> None:
        self.rows.remove(row)
        self.free_pages.extend(row.pages)

    def build(self, parts: Sequence[tuple[DriverRow, int]]) -> StepBatch:
        """A step that computes the next `count` tokens of each (row, count); rows of one token come first."""
        parts = sorted(parts, key=lambda part: part[1] != 1)
        inits = []
        for row, count in parts:
            while len(row.pages) // self.num_groups * self.page_size < row.computed + count:
                row.pages += [self.free_pages.pop() for _ in range(self.num_groups)]
            if not row.announced:
                row.announced = True
                inits.append(SlotInit(row.slot, row.sampling, np.array(row.tokens, np.int32), row.num_prompt_tokens))
        adapters = np.array([row.adapter for row, _ in parts], np.int32)
        table = np.zeros((len(parts), max(len(row.pages) for row, _ in parts)), np.int32)
        for index, (row, _) in enumerate(parts):
            table[index, : len(row.pages)] = row.pages
        return StepBatch(
            input_ids=np.array(
                [token for row, count in parts for token in row.tokens[row.computed : row.computed + count]], np.int32
            ),
            query_starts=np.cumsum([0, *(count for _, count in parts)]).astype(np.int32),
            context_lens=np.array([row.computed for row, _ in parts], np.int32),
            page_table=table if self.num_groups == 1 else table.reshape(len(parts), -1, self.num_groups),
            slots=np.array([row.slot for row, _ in parts], np.int32),
            logit_rows=np.array(
                [i for i, (row, count) in enumerate(parts) if row.computed + count == len(row.tokens)], np.int32
            ),
            slot_inits=tuple(inits),
            embeddings=tuple(self._embeddings(parts)),
            scored=self._scored(parts),
            adapters=adapters if adapters.max() > NO_ADAPTER else None,
        )

    def _scored(self, parts: Sequence[tuple[DriverRow, int]]) -> ScoredTokens | None:
        tokens: list[int] = []
        next_ids: list[int] = []
        first = 0
        for row, count in parts:
            num_scored = max(0, min(count, row.num_prompt_tokens - 1 - row.computed)) if row.is_scored else 0
            tokens += range(first, first + num_scored)
            next_ids += row.tokens[row.computed + 1 : row.computed + 1 + num_scored]
            first += count
        if not tokens:
            return None
        return ScoredTokens(np.array(tokens, np.int32), np.array(next_ids, np.int32), self.num_top)

    def _embeddings(self, parts: Sequence[tuple[DriverRow, int]]) -> Iterator[EmbeddedTokens]:
        first = 0
        for row, count in parts:
            if row.embeddings is not None and row.computed < row.num_prompt_tokens:
                yield EmbeddedTokens(first, self.give(row.embeddings[row.computed : row.computed + count]))
            first += count

    def step(self, parts: Sequence[tuple[DriverRow, int]]) -> dict[int, NDArray[np.float32]]:
        """Run one step and append sampled tokens to rows that caught up. Return the results of `read`, by slot."""
        batch = self.build(parts)
        ordered = sorted(parts, key=lambda part: part[1] != 1)
        logits = self.forward_pass.forward(batch)
        host = np.array(self.read(logits))
        output = self.forward_pass.sample(logits, batch).wait()
        sampled = output.token_ids
        if batch.scored is not None:
            assert output.scored is not None
            rows = np.searchsorted(batch.query_starts, batch.scored.tokens, side="right") - 1
            for row_index, entry in zip(rows.tolist(), one_by_one(output.scored), strict=True):
                self.scores.setdefault(ordered[row_index][0].slot, []).append(entry)
        for row, count in ordered:
            row.computed += count
        for index, token in zip(batch.logit_rows.tolist(), sampled.tolist(), strict=True):
            ordered[index][0].tokens.append(token)
        return {ordered[index][0].slot: host[i] for i, index in enumerate(batch.logit_rows.tolist())}

    def prefill(self, chunk: int | None = None) -> dict[int, NDArray[np.float32]]:
        """Compute every row up to its last token, at most `chunk` tokens of it per step. Return last logits by slot."""
        logits: dict[int, NDArray[np.float32]] = {}
        while pending := [row for row in self.rows if row.computed < len(row.tokens) and row.slot not in logits]:
            parts = [(row, len(row.tokens) - row.computed) for row in pending]
            logits |= self.step([(row, min(count, chunk or count)) for row, count in parts])
        return logits

    def decode(self, num_tokens: int) -> None:
        """Generate num_tokens tokens for every row, all rows in one batch."""
        for _ in range(num_tokens):
            self.step([(row, 1) for row in self.rows])


def one_by_one(logprobs: TokenLogprobs) -> list[TokenLogprobs]:
    columns = (logprobs.rows, logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top)
    return [TokenLogprobs(*(column[place : place + 1] for column in columns)) for place in range(len(logprobs.chosen))]


def joined(entries: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Log probabilities of several tokens, without their rows."""
    return TokenLogprobs(
        np.arange(len(entries), dtype=np.int32),
        *(
            np.concatenate([getattr(entry, name) for entry in entries])
            for name in ("chosen", "ranks", "top_ids", "top")
        ),
    )


def run_in_a_used_slot(driver: Driver, prompt: Sequence[int], others: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """The last logits of a prompt in chunks, beside others, in the slot of another sequence that had begun there, as
    after a preemption. others: two prompts, of which the second has 30 tokens."""
    first, *_ = rows = [driver.add(tokens) for tokens in (prompt, *others)]
    driver.step([(first, 20), (rows[2], 3)])
    driver.remove(first)
    driver.step([(driver.add(others[1]), 9), (rows[1], 1)])
    again = driver.add(prompt)
    logits: dict[int, NDArray[np.float32]] = {}
    for count in (1, 2, 7, 35):
        logits = driver.step([(again, count), (rows[2], 1)])
    return logits[again.slot]


def run_past_window(driver: Driver, *, is_poisoned: bool) -> NDArray[np.float32]:
    """Logits of a sequence of 150 tokens and two more, as one row and as another with other chunks.

    The model's windows are of 16 tokens. The steps at 142 begin with a window that begins with the
    last token of a block. If it is poisoned, a page that was never written stands for each page behind the window.
    """
    prompt = np.random.default_rng(0).integers(0, 200, 150).tolist()
    groups = KvGroups.of(driver.page_size, driver.forward_pass.spec.kv_windows, 0, 0)
    logits: list[NDArray[np.float32]] = []
    num_passed = []
    for counts in ((110, 1, 31, 1, 7, 1, 1), (100, 42, 8, 1, 1)):
        row = driver.add(prompt)
        for count in counts:
            passed = groups.num_passed(row.computed)
            num_passed.append(max(passed))
            if is_poisoned:
                for group, end in enumerate(passed):
                    row.pages[group : end * groups.count : groups.count] = driver.free_pages[:1] * end
            logits += driver.step([(row, count)]).values()
    assert num_passed[3] * driver.page_size == num_passed[9] * driver.page_size == 64
    return np.array(logits)
