"""DRY: makes tokens less likely that would continue a repetition, as llama.cpp does."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import SamplingParams

_END = -1
"""Ends each breaker in `SamplingParams.dry_breakers`."""
_SPARE_TOKENS = 256
_MAX_PENALTY = 1e30
"""Leaves logits finite."""
_LARGEST_LOG = math.log(float(np.finfo(np.float32).max))


class Breakers(NamedTuple):
    """Runs of tokens that no repetition extends over, in arrays that kernels read too."""

    heads: NDArray[np.int32]
    """The first token of each run, ascending; of equal ones the shortest run first."""
    tail_starts: NDArray[np.int64]
    tail_tokens: NDArray[np.int32]
    """The other tokens of all runs: those of run b are [tail_starts[b], tail_starts[b + 1])."""
    is_head: NDArray[np.bool_]
    """[V, rounded up to 32]"""
    heads_mask: NDArray[np.uint8]
    """The same, a bit a token."""

    def tails_of(self, head: int) -> list[tuple[int, ...]]:
        """The other tokens of the runs that begin with head, the shortest first."""
        first, end = np.searchsorted(self.heads, [head, head + 1]).tolist()
        starts = self.tail_starts[first : end + 1].tolist()
        return [tuple(self.tail_tokens[a:b].tolist()) for a, b in itertools.pairwise(starts)]


@lru_cache(maxsize=16)
def read_breakers(dry_breakers: bytes, vocab_size: int) -> Breakers:
    """From `SamplingParams.dry_breakers`. Cached: reading thousands takes milliseconds, for each new slot."""
    flat = np.frombuffer(dry_breakers, np.int32)
    runs = sorted(
        (tuple(run[:-1].tolist()) for run in np.split(flat, np.flatnonzero(flat == _END) + 1) if len(run) > 1),
        key=lambda run: (run[0], len(run)),
    )
    heads = np.array([run[0] for run in runs], np.int32)
    is_head = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_head[heads] = True
    return Breakers(
        heads,
        np.cumsum([0, *(len(run) - 1 for run in runs)], dtype=np.int64),
        np.array([token for run in runs for token in run[1:]], np.int32),
        is_head,
        np.packbits(is_head, bitorder="little"),
    )


class Repetitions:
    """One slot's DRY: the tokens of its sequence by position, and the breakers. An embedding in a prompt is one too."""

    def __init__(self, params: SamplingParams, token_ids: NDArray[np.int32], vocab_size: int) -> None:
        self._params = params
        self.tokens = np.concatenate([token_ids, np.empty(_SPARE_TOKENS, np.int32)])
        self.breakers = read_breakers(params.dry_breakers, vocab_size)
        self.window = params.dry_penalty_last_n if params.dry_penalty_last_n >= 0 else 1 << 62

    def make_room(self, position: int) -> bool:
        """Return whether the tokens have moved."""
        if position < len(self.tokens):
            return False
        self.tokens = np.concatenate([self.tokens, np.empty(position + _SPARE_TOKENS, np.int32)])
        return True

    def penalise(self, logits: NDArray[np.float32], position: int) -> None:
        """Change the logits [V] of the token at this position in place."""
        params, num = self._params, min(position, self.window)
        tokens = self.tokens[position - num : position]
        limit = self._length_since_breaker(tokens)
        if limit < params.dry_allowed_length or num < 2:
            return
        lengths, following = _match_lengths(tokens, limit), tokens[1:]
        continuing = (lengths >= params.dry_allowed_length) & (following >= 0)
        ids, places = np.unique(following[continuing], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, places, lengths[continuing])
        highest = int(_LARGEST_LOG / math.log(params.dry_base)) if params.dry_base > 1.000001 else 1 << 62
        for token, length in zip(ids.tolist(), longest.tolist(), strict=True):
            if () not in self.breakers.tails_of(token):
                power = min(length - params.dry_allowed_length, highest)
                logits[token] -= np.float32(min(params.dry_multiplier * params.dry_base**power, _MAX_PENALTY))

    def _length_since_breaker(self, tokens: NDArray[np.int32]) -> int:
        """How many of the last tokens lie behind the last breaker."""
        for index in np.flatnonzero((tokens < 0) | self.breakers.is_head[tokens])[::-1].tolist():
            if tokens[index] < 0:
                return len(tokens) - 1 - int(index)
            for tail in reversed(self.breakers.tails_of(int(tokens[index]))):
                if tuple(tokens[index + 1 : index + 1 + len(tail)].tolist()) == tail:
                    return len(tokens) - 1 - int(index) - len(tail)
        return len(tokens)


def _match_lengths(tokens: NDArray[np.int32], limit: int) -> NDArray[np.int64]:
    """Return [n - 1]: how many tokens up to each one, itself included, equal those at the end; at most limit.

    Linear: the Z algorithm over the tokens from the end.
    """
    text = tokens[::-1].tolist()
    lengths = [0] * len(text)
    begin = end = 0
    for index in range(1, len(text)):
        length = min(lengths[index - begin], end - index) if index < end else 0
        while index + length < len(text) and text[length] == text[index + length]:
            length += 1
        lengths[index] = length
        if index + length > end:
            begin, end = index, index + length
    return np.minimum(np.array(lengths[:0:-1], np.int64), limit)
