"""Chooses drafts: guesses of a step's next tokens that the same step verifies."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import Protocol

from penstock.backend.forward_pass import MAX_VERIFIED
from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.sequences.prompt_lookup import MAX_GUESSED, Guesser
from penstock.backend.sequences.sequence import Sequence

MAX_ROWS = 4
"""With more, rows fill a step: drafts save CPU time, but the gaps behind their steps cost as much."""
MAX_DRAFTS = MAX_VERIFIED - MAX_ROWS
"""Drafts of a step."""
MAX_STATE_DRAFTS = 6
"""The same for a pass with states, which keeps one for each: they have 20 to 150 MB."""
_MIN_CHANCE = 0.1
"""Drafts that are less likely are not looked at."""
PLANS_PER_TRIAL = 32
"""If likely drafts seem too dear, one plan in so many has some all the same, which renews an old measurement."""
_TRIED_CHANCE, _MAX_TRIED = 0.6, 8
MIN_GAIN = 1.15
"""Drafts must promise at least this many times the tokens a second: times of steps are estimates."""


class StepTimes(Protocol):
    """Measured times of steps: `StepTiming`."""

    gap_s: float
    """From the end of a step with drafts to the next one, which cannot be planned ahead."""

    def typical_s(self, num_tokens: int) -> float | None:
        """The duration of a step of so many tokens; None if it is not known yet."""


class Drafting:
    """Drafts where they are expected to bring more tokens a second. It changes no token, whatever it chooses."""

    def __init__(self, times: StepTimes, texts: EarlierTexts | None = None, max_drafts: int = MAX_DRAFTS) -> None:
        self._times = times
        self.max_drafts = max_drafts
        self.texts = texts
        """Those of the pool's pages."""
        self._num_refused = 0
        """Plans without drafts of which one was likely."""

    def choose(self, decodes: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return drafts of sequences that decode in the next step, for the tokens after their num_computed."""
        if len(decodes) > MAX_ROWS:
            return {}
        guesses: dict[Sequence, list[int]] = {}
        chances: list[tuple[float, Sequence]] = []
        for sequence in decodes:
            if may_have_drafts(sequence):
                guess = self._guess(sequence)
                if guess:
                    guesses[sequence] = [token for token, _ in guess]
                    chances += [(chance, sequence) for _, chance in guess if chance >= _MIN_CHANCE]
        if not chances:
            return {}
        chances.sort(key=_chance, reverse=True)
        drafts: dict[Sequence, list[int]] = {}
        del chances[self.max_drafts :]
        for _, sequence in chances[: self._best_count(len(decodes), [chance for chance, _ in chances])]:
            chosen = drafts.setdefault(sequence, [])
            chosen.append(guesses[sequence][len(chosen)])
        return drafts

    def _guess(self, sequence: Sequence) -> list[tuple[int, float]]:
        """Tokens after the sequence's num_computed, and their chances. The tokens between are being sampled."""
        guess, chances = self._listed(sequence)
        num_coming = sequence.num_computed - len(sequence.tokens)
        # The very last token is never computed.
        end = num_coming + min(MAX_GUESSED, sequence.max_total_tokens - 1 - sequence.num_computed)
        return list(takewhile(_is_word, list(zip(guess, chances, strict=True))[num_coming:end]))

    def _listed(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """Tokens after the known ones, and their chances."""
        if sequence.guesser is None:
            sequence.guesser = Guesser(sequence.max_total_tokens)
        guess = sequence.guesser.guess(sequence.tokens, _forced(sequence), partial(self._find_earlier, sequence))
        return guess, sequence.guesser.chances(len(guess)) if guess else []

    def _find_earlier(self, sequence: Sequence) -> list[int]:
        return [] if self.texts is None else self.texts.find(sequence.salt, sequence.tokens)

    def _best_count(self, num_rows: int, chances: list[float]) -> int:
        """The number of drafts with the most tokens a second. chances descend. Without drafts each row brings one."""
        alone_s, all_s = self._times.typical_s(num_rows), self._times.typical_s(num_rows + len(chances))
        if alone_s is None or all_s is None:
            return 0
        draft_s = max(0.0, all_s - alone_s) / len(chances)
        best, best_rate = 0, MIN_GAIN * num_rows / alone_s
        num_tokens, seconds = float(num_rows), alone_s + self._times.gap_s
        for count, chance in enumerate(chances, start=1):
            num_tokens += chance
            seconds += draft_s
            if num_tokens / seconds > best_rate:
                best, best_rate = count, num_tokens / seconds
        return best or self._num_tried(chances)

    def _num_tried(self, chances: list[float]) -> int:
        num_likely = sum(chance >= _TRIED_CHANCE for chance in chances)
        self._num_refused += num_likely > 0
        return min(num_likely, _MAX_TRIED) if self._num_refused % PLANS_PER_TRIAL == 0 else 0


def may_have_drafts(sequence: Sequence) -> bool:
    """Log probabilities, and logits for clients, are those of one token a row."""
    return sequence.sampling.num_logprobs < 0 and sequence.output is None and sequence.embeddings is None


def _is_word(entry: tuple[int, float]) -> bool:
    """It is no token of a picture."""
    return entry[0] >= 0


def _forced(sequence: Sequence) -> list[int]:
    """The tokens that its grammar forces after the known ones, as far as the executor has found any."""
    if (constraints := sequence.constraints) is None:
        return []
    constraints.wants_guess = True
    num_tokens, tokens = constraints.guess
    return tokens if num_tokens == len(sequence.tokens) - sequence.num_prompt_tokens else []


def _chance(entry: tuple[float, Sequence]) -> float:
    return entry[0]
