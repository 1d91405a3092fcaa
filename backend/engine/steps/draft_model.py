"""A small model beside the target, which guesses the target's next tokens. Used on the executor's thread."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.backend.engine.steps.model_drafting import MAX_OF_MODEL
from penstock.backend.forward_pass import SamplingParams, SlotInit, StepBatch, StepOutput
from penstock.backend.forward_pass.extensions import IGuesser
from penstock.backend.kv_cache.prefix_cache import count_common_tokens
from penstock.backend.scheduling.drafting import MAX_ROWS

_MIN_CHANCE = 0.3


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A text that is to be continued. tokens and pages do not change until the guess is made."""

    tokens: array[int]
    num_prompt_tokens: int
    pages: list[int]
    """The target's pages of the text."""
    slot: int
    """The target's."""
    salt: bytes
    sampling: SamplingParams
    stop_ids: Collection[int]
    max_guessed: int


@dataclass(slots=True)
class Guesses:
    """One list for each ask, None for a text that is still to be read; and the time of passes of few tokens."""

    tokens: list[list[int] | None]
    num_passes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _WrittenPage:
    """The text whose keys and values are in a page."""

    before: int
    """Names the texts of the pages before it, and their tenant."""
    tokens: array[int]
    """The tokens of its first places."""
    after: int = 0
    """Names the text up to its end, when it is full."""


@dataclass(slots=True, eq=False)
class _Row:
    ask: DraftAsk
    text: NDArray[np.int32]
    slot: int
    pages: list[int]
    """The target's, and spare ones behind them."""
    start: int
    """Tokens whose keys are in the pages."""
    next_tokens: array[int]
    is_first: bool = True
    guessed: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.start + len(self.next_tokens) >= len(self.ask.tokens)


def num_spare_pages(page_size_tokens: int) -> int:
    """Pages of a draft model in addition to the target's: for guesses behind the pages of the sequences."""
    return MAX_ROWS * -(-MAX_OF_MODEL // page_size_tokens)


class DraftModel:
    """A forward pass with a KV cache of the target's page numbers, which it owns.

    A page's keys are written when a text is first continued, and known by the text up to the page's end: so a page that
    another sequence took, or that came back from elsewhere, is written again, and nobody has to say so. A text of one
    tenant is not known to another.
    """

    def __init__(
        self,
        forward_pass: IGuesser,
        num_pages: int,
        page_size_tokens: int,
        max_batch_tokens: int,
        min_chance: float = _MIN_CHANCE,
    ) -> None:
        """num_pages: the target's; the pass's cache has `num_spare_pages` more. min_chance: a token of which the pass
        is less certain is no guess, and none follows it."""
        self._pass = forward_pass
        self._num_pages, self._page_size = num_pages, page_size_tokens
        self._max_batch_tokens, self._min_logprob = max_batch_tokens, math.log(min_chance)
        self._written: dict[int, _WrittenPage] = {}

    def guess(self, asks: Iterable[DraftAsk], vocab_size: int) -> Guesses:
        """Continue at most MAX_ROWS texts. Nothing is guessed of one with a token that the pass does not know.

        vocab_size: the target's. Draws are the target's own: they depend on the seed and the position.
        """
        rows = [self._make_row(ask, slot) for slot, ask in enumerate(asks)]
        result, vocab_size = Guesses([]), min(vocab_size, self._pass.spec.vocab_size)
        live, taken, left = list[_Row](), set[int](), self._max_batch_tokens
        for row in rows:
            is_known = row.text.min() >= 0 and row.text.max() < vocab_size
            written = row.pages[row.start // self._page_size :]
            has_room = left > 0 and row.ask.max_guessed > 0
            is_read = is_known and has_room and taken.isdisjoint(written)  # texts may share unwritten pages
            if is_read:
                del row.next_tokens[left:]
                left -= len(row.next_tokens)
                taken.update(written)
                live.append(row)
            result.tokens.append(row.guessed if (is_read and row.is_whole) or not is_known else None)
        while live:
            began_s, num_tokens = time.perf_counter(), sum(len(row.next_tokens) for row in live)
            sampling, output = self._step(live)
            if num_tokens <= MAX_ROWS * (1 + MAX_OF_MODEL):
                result.num_passes += 1
                result.seconds += time.perf_counter() - began_s
            live = self._continue(sampling, output, vocab_size)
        return result

    def close(self) -> None:
        self._pass.close()

    def _make_row(self, ask: DraftAsk, slot: int) -> _Row:
        num_spare = num_spare_pages(self._page_size) // MAX_ROWS
        first_spare = self._num_pages + slot * num_spare
        start = min(self._num_known(ask), len(ask.tokens) - 1)
        pages = [*ask.pages, *range(first_spare, first_spare + num_spare)]
        return _Row(ask, np.array(ask.tokens, np.int32), slot, pages, start, ask.tokens[start:])

    def _num_known(self, ask: DraftAsk) -> int:
        """The first tokens whose keys are in the pages."""
        name, size = hash(ask.salt), self._page_size
        for index, page in enumerate(ask.pages):
            written, first = self._written.get(page), index * size
            if written is None or written.before != name:
                return first
            tokens = ask.tokens[first : first + size]
            if written.tokens != tokens or len(tokens) < size:
                return first + count_common_tokens(written.tokens.tobytes(), tokens.tobytes())
            name = written.after
        return len(ask.pages) * size

    def _step(self, rows: list[_Row]) -> tuple[list[_Row], StepOutput]:
        """Compute the rows' next tokens. Return the rows that got another one, and it."""
        rows = sorted(rows, key=lambda row: len(row.next_tokens) > 1)
        sampling, batch = [row for row in rows if row.is_whole], self._make_batch(rows)
        output = self._pass.sample(self._pass.forward(batch), batch).wait()
        for row in rows:
            self._note_written(row)
            row.start += len(row.next_tokens)
            row.is_first = False
        return sampling, output

    def _continue(self, rows: list[_Row], output: StepOutput, vocab_size: int) -> list[_Row]:
        """Take the rows' new tokens. Return the rows that go on."""
        if output.logprobs is None:
            return []
        live, reported = [], output.logprobs  # without rows that have no token
        logprobs = dict(zip(reported.rows.tolist(), reported.chosen.tolist(), strict=True))
        for place, (row, token) in enumerate(zip(rows, output.token_ids.tolist(), strict=True)):
            if not (0 <= token < vocab_size and logprobs[place] >= self._min_logprob):
                continue
            row.guessed.append(token)
            if len(row.guessed) < row.ask.max_guessed and token not in row.ask.stop_ids:
                row.next_tokens = array("i", [token])
                live.append(row)
        return live

    def _make_batch(self, rows: list[_Row]) -> StepBatch:
        size = self._page_size
        num_pages = [-(-(row.start + len(row.next_tokens)) // size) for row in rows]
        table = np.zeros((len(rows), max(num_pages)), np.int32)
        for index, (row, count) in enumerate(zip(rows, num_pages, strict=True)):
            table[index, :count] = row.pages[:count]
        lengths = [len(row.next_tokens) for row in rows]
        return StepBatch(
            input_ids=np.concatenate([np.array(row.next_tokens, np.int32) for row in rows]),
            query_starts=np.cumsum([0, *lengths]).astype(np.int32),
            context_lens=np.array([row.start for row in rows], np.int32),
            page_table=table,
            slots=np.array([row.slot for row in rows], np.int32),
            logit_rows=np.array([index for index, row in enumerate(rows) if row.is_whole], np.int32),
            slot_inits=tuple(self._slot_init(row) for row in rows if row.is_first),
        )

    def _slot_init(self, row: _Row) -> SlotInit:
        sampling, vocab_size = row.ask.sampling, self._pass.spec.vocab_size
        bias = tuple((token, bias) for token, bias in sampling.logit_bias if token < vocab_size)
        sampling = replace(sampling, num_logprobs=0, logprob_token_ids=(), logit_bias=bias)
        return SlotInit(row.slot, sampling, row.text, row.ask.num_prompt_tokens)

    def _note_written(self, row: _Row) -> None:
        size, position, tokens = self._page_size, row.start, row.next_tokens
        while tokens:
            index, place = divmod(position, size)
            name = self._written[row.pages[index - 1]].after if index else hash(row.ask.salt)
            old = self._written[row.pages[index]].tokens[:place] if place else array("i")
            page = self._written[row.pages[index]] = _WrittenPage(name, old + tokens[: size - place])
            if len(page.tokens) == size:
                page.after = hash((name, page.tokens.tobytes()))
            position, tokens = position + size - place, tokens[size - place :]


class HeadModel(DraftModel):
    """The target's own head (`IGuessesTokens`): the target writes its keys and values, so no text is to be read, and
    there are no spare pages."""

    def _make_row(self, ask: DraftAsk, slot: int) -> _Row:
        start = len(ask.tokens) - 1
        room = len(ask.pages) * self._page_size - start
        ask = replace(ask, max_guessed=min(ask.max_guessed, room))
        return _Row(ask, np.array(ask.tokens, np.int32), slot, ask.pages, start, ask.tokens[start:])

    def _make_batch(self, rows: list[_Row]) -> StepBatch:
        restores = tuple((row.ask.slot, row.slot) for row in rows if row.is_first)
        return replace(super()._make_batch(rows), state_restores=restores)

    def _note_written(self, row: _Row) -> None:
        """Nothing: whatever is guessed is written again by the target."""
