"""The requests of a run, when each is sent and which of them hang up: all drawn in advance from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Short common words, which most tokenizers make one token of. The server's usage has the real count.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face others level
office door health person art war history party result change morning reason research girl guy moment air
teacher force
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of token counts, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    """Return "64" or "16:128" as a range. Raises ValueError for anything else."""
    low, colon, high = text.partition(":")
    try:
        lengths = Lengths(int(low), int(high) if colon else int(low))
    except ValueError:
        raise ValueError(f'"{text}" is not a length; write 64 or 16:128') from None
    if not 1 <= lengths.low <= lengths.high:
        raise ValueError(f'"{text}" is not a length: both ends are at least 1, and the first is not above the second')
    return lengths


def draw_words(rng: random.Random, count: int, separator: str = " ") -> str:
    return separator.join(rng.choices(_WORDS, k=count))


Prompt = tuple[int, ...] | str


@dataclass(frozen=True, slots=True)
class Drop:
    """When a client hangs up: delay_s after its after_events-th event, or at the next event if that comes first.

    With after_events 0, the delay counts from sending the request.
    """

    after_events: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    prompt: Prompt
    output_tokens: int
    due_s: float = 0.0
    """After the run's start; 0 in a closed loop."""
    drop: Drop | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """How requests are drawn. duplicates and drop are shares of the number of requests, rounded."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    vocab_size: int | None = None
    """Bound of random token ids; None draws prompts of words."""
    duplicates: float = 0.0
    drop: float = 0.0
    rate_per_s: float | None = None
    """Rate of a Poisson process of arrivals; None for a closed loop."""

    def draw(self, num_requests: int, seed: int) -> list[PlannedRequest]:
        """The same workload, count and seed give the same requests."""
        rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
        prompts = self._draw_prompts(num_requests, rng)
        dropped = set(rng.sample(range(num_requests), round(self.drop * num_requests)))
        due_s = 0.0
        requests = []
        for index, prompt in enumerate(prompts):
            output_tokens = self.output_tokens.draw(rng)
            drop = _draw_drop(output_tokens, rng) if index in dropped else None
            requests.append(PlannedRequest(prompt, output_tokens, due_s, drop))
            if self.rate_per_s is not None:
                due_s += rng.expovariate(self.rate_per_s)
        return requests

    def _draw_prompts(self, num_requests: int, rng: random.Random) -> list[Prompt]:
        """The first prompt is always new; a duplicate repeats one drawn before it."""
        num_duplicates = min(round(self.duplicates * num_requests), num_requests - 1)
        repeats = set(rng.sample(range(1, num_requests), num_duplicates))
        prompts: list[Prompt] = []
        for index in range(num_requests):
            prompts.append(rng.choice(prompts) if index in repeats else self._draw_prompt(rng))
        return prompts

    def _draw_prompt(self, rng: random.Random) -> Prompt:
        length = self.prompt_tokens.draw(rng)
        if self.vocab_size is None:
            return draw_words(rng, length)
        # Special tokens are at either end of a vocabulary.
        low, high = self.vocab_size // 8, self.vocab_size - self.vocab_size // 8
        return tuple(rng.randrange(low, high) for _ in range(length))


def _draw_drop(output_tokens: int, rng: random.Random) -> Drop:
    """A quarter of the clients hang up before the first token, while queued or in prefill."""
    after_events = 0 if rng.random() < 0.25 else rng.randrange(1, max(output_tokens, 2))
    return Drop(after_events, rng.uniform(0.0, 0.03))
