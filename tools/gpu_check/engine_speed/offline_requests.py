"""The offline workload of nano-vllm's benchmark: 256 requests of random lengths, submitted at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    prompt: list[int]
    num_new_tokens: int


def draw_offline_requests(count: int, shortest: int, longest: int, vocab_size: int) -> list[OfflineRequest]:
    """Draw uniform lengths (bounds included) in the same order as nano-vllm's benchmark, from seed 0.

    256 requests of 100 to 1,024 tokens are exactly its workload.
    """
    draw = random.Random(0)  # noqa: S311 - fixed seed, so that all engines get the same lengths
    most = min(_MAX_TOKEN_ID, vocab_size - 1)
    prompts = [[draw.randint(0, most) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return [OfflineRequest(prompt, draw.randint(shortest, longest)) for prompt in prompts]
