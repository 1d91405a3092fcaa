"""Decides when a draft model guesses, and how many tokens: where that is expected to bring more tokens a second."""

from __future__ import annotations

from collections.abc import Collection

from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.scheduling.drafting import (
    MAX_DRAFTS,
    MAX_ROWS,
    MIN_GAIN,
    PLANS_PER_TRIAL,
    Drafting,
    StepTimes,
    may_have_drafts,
)
from penstock.backend.sequences.prompt_lookup import Guesser
from penstock.backend.sequences.sequence import Sequence

MAX_OF_MODEL = 8
"""Tokens that the draft model guesses of a sequence at a time."""
_NUM_TRIED = 3
_TRIALS_APART = 4 * PLANS_PER_TRIAL
"""A trial may have to read a whole text first."""
_WEIGHT = 0.1
_FREE = 0.8
"""Another guess this many times as likely as the model's is as good: it costs nothing and is longer."""


class ModelDrafting(Drafting):
    """Guesses of a draft model beside the others, or alone. What the text or the grammar promises goes first: it costs
    nothing."""

    def __init__(
        self,
        times: StepTimes,
        texts: EarlierTexts | None,
        max_context_tokens: int,
        max_drafts: int = MAX_DRAFTS,
        *,
        is_alone: bool = False,
    ) -> None:
        """max_context_tokens: the longest text that the draft model continues."""
        super().__init__(times, texts, max_drafts)
        self._max_context_tokens = max_context_tokens
        self._is_alone = is_alone
        self._pass_s: float | None = None
        """An average of the draft model's passes of one token a row."""
        self._num_plans = 0
        """Plans since the draft model was asked last."""

    def wanted(self, decodes: Collection[Sequence]) -> dict[Sequence, int]:
        """Sequences that the draft model should continue before the next plan, each with a number of tokens."""
        if not 0 < len(decodes) <= MAX_ROWS or any(each.num_computed < each.num_given_tokens for each in decodes):
            return {}
        rows = [sequence for sequence in decodes if self._may_continue(sequence)]
        count = min(self._best_length(len(decodes), rows), self.max_drafts) if rows else 0
        left = [sequence.max_total_tokens - 1 - len(sequence.tokens) for sequence in rows]
        return {sequence: min(count, most) for sequence, most in zip(rows, left, strict=True) if min(count, most) > 0}

    def choose(self, decodes: list[Sequence]) -> dict[Sequence, list[int]]:
        self._num_plans += 1
        return super().choose(decodes)

    def note_guessed(self, num_passes: int, seconds: float) -> None:
        """Note how long so many passes took."""
        self._num_plans = 0
        if num_passes:
            pass_s = seconds / num_passes
            self._pass_s = pass_s if self._pass_s is None else self._pass_s + _WEIGHT * (pass_s - self._pass_s)

    def _may_continue(self, sequence: Sequence) -> bool:
        if not may_have_drafts(sequence) or sequence.pictures is not None:
            return False
        if len(sequence.tokens) + MAX_OF_MODEL > self._max_context_tokens:
            return False
        _, chances = self._listed(sequence)
        guesser = sequence.guesser
        return guesser is not None and (not chances or chances[0] < _FREE * guesser.chances(1, of_model=True)[0])

    def _listed(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        if self._is_alone and sequence.guesser is None:
            sequence.guesser = Guesser(sequence.max_total_tokens, looks_up=False)
        return super()._listed(sequence)

    def _best_length(self, num_rows: int, rows: list[Sequence]) -> int:
        """The number of guessed tokens with the most tokens a second; rows are those of num_rows that have some."""
        most_tokens = num_rows + MAX_OF_MODEL * len(rows)
        alone_s, all_s = self._times.typical_s(num_rows), self._times.typical_s(most_tokens)
        if not alone_s or all_s is None or self._pass_s is None:
            return _NUM_TRIED
        draft_s = max(0.0, all_s - alone_s) / MAX_OF_MODEL
        best, best_rate = 0, MIN_GAIN * num_rows / alone_s
        chances = [each.guesser.chances(MAX_OF_MODEL, of_model=True) for each in rows if each.guesser is not None]
        num_tokens, seconds = float(num_rows), alone_s + 2 * self._times.gap_s  # the model is asked, then the plan made
        for count, of_rows in enumerate(zip(*chances, strict=True), start=1):
            num_tokens += sum(of_rows)
            seconds += self._pass_s + draft_s
            if num_tokens / seconds > best_rate:
                best, best_rate = count, num_tokens / seconds
        return best or _NUM_TRIED * (self._num_plans >= _TRIALS_APART)
