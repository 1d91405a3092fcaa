"""Texts of exact lengths for embedding models."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.tools.bench.errors import BenchError

NUM_WORDS = 2000
_SPECIAL_TOKENS = 2
_MIXED_LENGTHS = ((16, 0.6), (128, 0.3), (512, 0.1))
"""(tokens, share) of the inputs of a mix."""


def word(index: int) -> str:
    """A word that is one token of the tokenizers that `penstock random-model --architecture bert` writes."""
    return f"w{index}"


@dataclass(frozen=True, slots=True)
class InputLength:
    """Tokens of an input with the two special ones, or "mix"."""

    name: str

    @classmethod
    def parse(cls, text: str) -> InputLength:
        """Raises BenchError."""
        if text != "mix" and not (text.isdecimal() and _SPECIAL_TOKENS < int(text) <= 1 << 16):
            raise BenchError(f'"{text}" is not a length of inputs; write a number of tokens from 3 to 65536, or mix')
        return cls(text)

    def draw(self, rng: random.Random) -> int:
        if self.name != "mix":
            return int(self.name)
        return rng.choices([length for length, _ in _MIXED_LENGTHS], [share for _, share in _MIXED_LENGTHS])[0]


def draw_text(num_tokens: int, rng: random.Random) -> str:
    """Text with num_tokens, including the two special ones.

    Equal texts are practically impossible, so no cache answers.
    """
    return " ".join(word(rng.randrange(NUM_WORDS)) for _ in range(num_tokens - _SPECIAL_TOKENS))


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one request."""

    texts: list[str]
    num_tokens: int


def draw_batches(length: InputLength, num_batches: int, batch_inputs: int, seed: int) -> list[Batch]:
    rng = random.Random(seed)  # noqa: S311
    batches = []
    for _ in range(num_batches):
        lengths = [length.draw(rng) for _ in range(batch_inputs)]
        batches.append(Batch([draw_text(num_tokens, rng) for num_tokens in lengths], sum(lengths)))
    return batches
