"""The offline workload by which nano-vllm and its like are compared: 256 requests of random lengths, all at once."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    prompt: list[int]
    num_new_tokens: int


def draw_offline_requests(count: int, shortest: int, longest: int, vocab_size: int) -> list[OfflineRequest]:
    """Lengths of prompts and of answers are uniform, ends included, in the order in which nano-vllm's benchmark draws
    them from seed 0: for 256 of 100 to 1,024 tokens the same that it runs.
    """
    draw = random.Random(0)  # noqa: S311 - the same lengths for all
    most = min(_MAX_TOKEN_ID, vocab_size - 1)
    prompts = [[draw.randint(0, most) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return [OfflineRequest(prompt, draw.randint(shortest, longest)) for prompt in prompts]
