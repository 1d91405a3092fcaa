"""What one sequence may sample next: a grammar's mask, lists of the client's, the end of reasoning when it is due.

Constraints know generated tokens only. They take in each token as it is sampled and give the next one's mask; what was
taken in and then dropped, as at a preemption, is taken back by its number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import TokenMasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from penstock.shm.messages import Constraints

    Row = NDArray[np.uint32]
    """[ceil(vocab_size / 32)] one bit for each token, as in `penstock.backend.forward_pass.TokenMasks`."""


_SHOWN_CHARACTERS = 300
"""Of what a grammar's author is told; a `Failure` takes no more than 512."""


class ConstraintFailed(Exception):
    """A grammar met a limit in the middle of an answer. It is the request's own fault, and ends it alone."""


def fill_masks(
    rows: list[tuple[int, int, SequenceConstraints]], vocab_size: int
) -> tuple[TokenMasks | None, dict[int, str]]:
    """The masks of a step, and why there is none for the rows whose constraints cannot go on.

    rows are (place in the step's logit rows, tokens generated so far, constraints), ascending.
    """
    bits = np.empty((len(rows), -(-vocab_size // 32)), np.uint32)
    filled: list[int] = []
    faults: dict[int, str] = {}
    for place, num_generated, constraints in rows:
        constraints.rewind(num_generated)
        try:
            constraints.fill(bits[len(filled)])
        except ConstraintFailed as error:
            faults[place] = str(error)
        else:
            filled.append(place)
    if not filled:
        return None, faults
    return TokenMasks(np.array(filled, np.int32), bits[: len(filled)]), faults


class SequenceConstraints:
    """Used by the thread that runs the steps, once it has been made."""

    def __init__(
        self,
        wanted: Constraints,
        matcher: LLMatcher | None,
        stop_ids: frozenset[int],
        vocab_size: int,
        forced: Sequence[int] = (),
    ) -> None:
        """matcher is the sequence's own, at its beginning; stop_ids are what min_tokens keeps out. The forced ids come
        first, and all else begins behind them: of a prompt whose log probabilities are wanted, all but the first.
        """
        self._wanted = wanted
        self._forced = forced
        self._num_forced = 0
        """Of them, how many have been taken in."""
        self._matcher = matcher
        allowed = wanted.allowed_token_ids
        self._allowed = _row_of(allowed, vocab_size) if allowed else _row_of_all(vocab_size)
        # Stop ids are nobody's business but the listener's: they may be beyond the vocabulary, and are never met then.
        self._all_but_stops = ~_row_of((stop_id for stop_id in stop_ids if stop_id < vocab_size), vocab_size)
        self._tokens: list[int] = []
        self._grammar_start = 0 if not wanted.grammar_after else None
        """Number of generated tokens at which the grammar began; None while it has not."""
        self._thinking_stop: int | None = None
        """Number of generated tokens with which thinking_end was complete; None while it is not."""

    @property
    def num_tokens(self) -> int:
        return self._num_forced + len(self._tokens)

    def advance(self, token_id: int) -> None:
        """Takes in the next generated token. Raises ConstraintFailed."""
        if self._num_forced < len(self._forced):
            self._num_forced += 1
            return
        self._tokens.append(token_id)
        if self._thinking_stop is None and self._ends_with(self._wanted.thinking_end):
            self._thinking_stop = len(self._tokens)
        if self._grammar_start is None:
            if self._ends_with(self._wanted.grammar_after):
                self._grammar_start = len(self._tokens)
        elif self._matcher is not None and not self._matcher.consume_token(token_id):
            raise ConstraintFailed(_told(self._matcher))

    def rewind(self, num_tokens: int) -> None:
        """Drops all but the first num_tokens that it has taken in, which may be all there are."""
        self._num_forced = min(num_tokens, self._num_forced)
        num_kept = min(num_tokens - self._num_forced, len(self._tokens))
        if self._grammar_start is not None:
            if self._matcher is not None and len(self._tokens) > self._grammar_start:
                self._matcher.rollback(len(self._tokens) - max(num_kept, self._grammar_start))
            if num_kept < self._grammar_start:
                self._grammar_start = None
        if self._thinking_stop is not None and num_kept < self._thinking_stop:
            self._thinking_stop = None
        del self._tokens[num_kept:]

    def fill(self, row: Row) -> None:
        """Writes the next token's mask, at least one bit of it set. Raises ConstraintFailed."""
        if (forced := self._forced_token()) is not None:
            row[:] = 0
            _set(row, forced)
            return
        row[:] = self._allowed
        if self._matcher is not None and self._grammar_start is not None:
            mask = np.zeros_like(row)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                raise ConstraintFailed(_told(self._matcher))
            row &= mask
            if not row.any():
                raise ConstraintFailed("the grammar and the lists of tokens leave nothing")
        # What only steers gives way where it would leave nothing.
        # An answer that has to match a grammar is none before that begins.
        may_stop = len(self._tokens) >= self._wanted.min_tokens and self._grammar_start is not None
        if not may_stop and (row & self._all_but_stops).any():
            row &= self._all_but_stops
        self._drop_bad_words(row)

    def _forced_token(self) -> int | None:
        """The next of those that come first; or of thinking_end, when the budget is spent."""
        if self._num_forced < len(self._forced):
            return self._forced[self._num_forced]
        wanted = self._wanted
        place = len(self._tokens) - wanted.thinking_budget_tokens
        is_due = wanted.thinking_budget_tokens > 0 and place >= 0 and self._thinking_stop is None
        return wanted.thinking_end[place] if is_due and place < len(wanted.thinking_end) else None

    def _drop_bad_words(self, row: Row) -> None:
        left = row.copy()
        for run in self._wanted.bad_words:
            if len(run) == 1 or self._ends_with(run[:-1]):
                _unset(left, run[-1])
        if left.any():
            row[:] = left

    def _ends_with(self, run: tuple[int, ...]) -> bool:
        return bool(run) and tuple(self._tokens[-len(run) :]) == run


def _told(matcher: LLMatcher) -> str:
    """One line of bounded length: parts of it may be the client's own text."""
    return " ".join(f"the grammar cannot go on: {matcher.get_error()}".split())[:_SHOWN_CHARACTERS]


@lru_cache(maxsize=1)
def _row_of_all(vocab_size: int) -> Row:
    return _row_of(range(vocab_size), vocab_size)


def _row_of(token_ids: Iterable[int], vocab_size: int) -> Row:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _set(row: Row, token_id: int) -> None:
    row[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _unset(row: Row, token_id: int) -> None:
    row[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
