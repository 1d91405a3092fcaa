"""Guesses the next tokens of a text: those that followed its last three tokens where these occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate, chain, repeat
from operator import mul

import numpy as np
from numpy.typing import NDArray

NUM_EQUAL = 3
"""Tokens that must be equal."""
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_MAX_BITS = 16
"""A table has at most this many bits of places: of longer texts some tokens are not found."""
_FEW_TOKENS = 16
"""More are indexed with numpy."""
MAX_GUESSED = 16
"""Tokens of a guess that can be drafted in one step."""
_OWN_TEXT, _EARLIER_TEXT, _GRAMMAR, _MODEL = range(4)
_WEIGHT = 0.15
"""The weight of the newest token in the running mean of how often guesses are right."""


class PromptLookup:
    """An index of a growing text by three consecutive tokens. Takes 4 to 8 bytes a token, at most 256 KiB."""

    __slots__ = ("_num_indexed", "_places", "_shift")

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: the most that the text is expected to have."""
        num_bits = min(_MAX_BITS, num_tokens.bit_length() + 1)
        self._shift = 32 - num_bits
        self._places = array("i", bytes(4 << num_bits))
        """Hash of three tokens → index of the token that followed them last; 0 for none. Tokens of one hash share a
        place."""
        self._num_indexed = NUM_EQUAL

    def find(self, tokens: array[int]) -> int:
        """The index from which the text may go on again; 0 if there is none.

        tokens: the text, which only grows from call to call.
        """
        num_tokens = len(tokens)
        if num_tokens < NUM_EQUAL:
            return 0
        if num_tokens - self._num_indexed > _FEW_TOKENS:
            self._index(np.array(tokens[self._num_indexed - NUM_EQUAL :], np.int32))
        for index in range(self._num_indexed, num_tokens):
            self._places[self._hash(tokens, index)] = index
        self._num_indexed = max(self._num_indexed, num_tokens)
        place = self._places[self._hash(tokens, num_tokens)]
        return place if tokens[place - NUM_EQUAL : place] == tokens[-NUM_EQUAL:] else 0

    def _hash(self, tokens: array[int], end: int) -> int:
        return mixed(tokens[end - 3], tokens[end - 2], tokens[end - 1]) >> self._shift

    def _index(self, tokens: NDArray[np.int32]) -> None:
        """Index all tokens but the first three. Of several with one place the last counts."""
        count = len(tokens) - NUM_EQUAL
        indices = np.arange(self._num_indexed, self._num_indexed + count, dtype=np.int32)
        np.frombuffer(self._places, np.int32)[mixed_runs(tokens) >> np.uint32(self._shift)] = indices
        self._num_indexed += count


def mixed(first: int, second: int, third: int) -> int:
    """32 bits that three tokens determine."""
    one, two, three = _FACTORS
    return (first * one + second * two + third * three) & 0xFFFFFFFF


def mixed_runs(tokens: NDArray[np.int32]) -> NDArray[np.uint32]:
    """`mixed` of the three tokens before each but the first three of a text, the last axis."""
    runs, count = tokens.astype(np.uint32), max(0, tokens.shape[-1] - NUM_EQUAL)
    hashes = np.zeros((*tokens.shape[:-1], count), np.uint32)
    for first, factor in enumerate(_FACTORS):
        hashes += runs[..., first : first + count] * np.uint32(factor)
    return hashes


class Guesser:
    """The guess of one sequence's next tokens, and how often its guesses come true: those from its text, those from
    earlier texts of its tenant, those of its grammar, and those of a draft model.

    A guess is followed as long as it is right. It is judged whether or not it was drafted, so that a sequence whose
    guesses were wrong is drafted again when they become right.
    """

    __slots__ = ("_first", "_kind", "_listed", "_lookup", "_num_right", "_passed_over", "_rates", "_source")

    def __init__(self, num_tokens: int, *, looks_up: bool = True) -> None:
        """num_tokens: the most that the sequence will have. looks_up: in its text."""
        self._lookup = PromptLookup(num_tokens) if looks_up else None
        self._source = 0
        """Index in the text from which the guess is taken; 0 if it is not from there."""
        self._listed: list[int] = []
        """The guess, if it is not from the text."""
        self._kind = _OWN_TEXT
        self._first = 0
        """Index of the guess's first token."""
        self._num_right = 0
        """First tokens of the guess that came true."""
        self._rates = [0.5, 0.5], [0.5, 0.5], [0.9, 0.9], [0.7, 0.7]
        """How often the first token of a guess comes true, and how often one that follows a right one; by its kind."""
        self._passed_over: tuple[int, bool, int] | None = None
        """Kind of the guess that a draft model's replaced, whether it had been right, and its token."""

    def guess(self, tokens: array[int], forced: list[int], find_earlier: Callable[[], list[int]] = list) -> list[int]:
        """Up to MAX_GUESSED tokens that may follow; none if the end of the text did not occur before. tokens only grow.

        forced: what the sequence's grammar seems to force next. It goes before a new guess from the text, and that
        mostly before find_earlier: what followed in an earlier text.
        """
        if self._passed_over is not None and self._first < len(tokens):
            kind, follows, token = self._passed_over
            self._judge(kind, tokens[self._first] == token, follows=follows)
            self._passed_over = None
        is_right, guessed = self._source > 0 or bool(self._listed), self._listed or tokens
        while is_right and self._first + self._num_right < len(tokens):
            if (index := self._source + self._num_right) == len(guessed):
                is_right = False
                break
            is_right = guessed[index] == tokens[self._first + self._num_right]
            self._judge(self._kind, is_right, follows=self._num_right > 0)
            self._num_right += is_right
        if not is_right or self._num_right == len(self._listed) > 0:
            self._begin(tokens, forced, find_earlier)
        if self._listed:
            return self._listed[self._num_right :][:MAX_GUESSED]
        return _continue_from(tokens, self._source + self._num_right) if self._source else []

    def _begin(self, tokens: array[int], forced: list[int], find_earlier: Callable[[], list[int]]) -> None:
        """Make a new guess, or none."""
        self._first, self._num_right = len(tokens), 0
        self._source = 0 if forced or self._lookup is None else self._lookup.find(tokens)
        self._listed, self._kind = forced, _GRAMMAR if forced else _OWN_TEXT
        is_earlier_better = self._rates[_EARLIER_TEXT][0] > self._rates[_OWN_TEXT][0]
        if not forced and (not self._source or is_earlier_better) and (found := find_earlier()):
            self._source, self._listed, self._kind = 0, found, _EARLIER_TEXT

    def _judge(self, kind: int, is_right: bool, *, follows: bool) -> None:
        rates = self._rates[kind]
        rates[follows] += _WEIGHT * (is_right - rates[follows])

    def take_guess(self, tokens: array[int], guessed: list[int]) -> None:
        """Follow what a draft model has guessed after these tokens, for which `guess` was called. The guess that it
        replaces is judged all the same. To guess nothing is wrong, so that the model is not always asked in vain."""
        if not guessed:
            self._judge(_MODEL, is_right=False, follows=False)
            return
        replaced = (self._listed or tokens)[self._source + self._num_right :] if self._source or self._listed else []
        self._passed_over = (self._kind, self._num_right > 0, replaced[0]) if replaced else None
        self._first, self._num_right, self._source = len(tokens), 0, 0
        self._listed, self._kind = guessed, _MODEL

    def chances(self, num_tokens: int, *, of_model: bool = False) -> list[float]:
        """The probability of each of the guess's next num_tokens tokens, together with those before it; of_model: of a
        new guess of a draft model."""
        first, following = self._rates[_MODEL if of_model else self._kind]
        first = following if self._num_right and not of_model else first
        return list(accumulate(chain([first], repeat(following, num_tokens - 1)), mul))


def _continue_from(tokens: array[int], index: int) -> list[int]:
    """MAX_GUESSED tokens from index on. A text that ends before them goes on from index again."""
    found = tokens[index : index + MAX_GUESSED].tolist()
    while len(found) < MAX_GUESSED:
        found += found[: MAX_GUESSED - len(found)]
    return found
