"""A fake backend whose tokens have log probabilities, as in the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.shm.client import GenerationRequest, LogprobEntry, TokenBatch
from penstock.shm.messages import Finish
from tests.frontend.harness import END_TOKEN, VOCAB_SIZE, FakeBackend, FakeStream, token_ids


def entry(token_id: int, position: int, width: int) -> LogprobEntry:
    """Return log probabilities in which the token is the second likeliest, cut to width."""
    top_ids = ((token_id + 1) % VOCAB_SIZE, token_id, *((token_id + 2 + i) % VOCAB_SIZE for i in range(18)))[:width]
    top_logprobs = tuple(-0.25 - 0.25 * rank - position for rank in range(width))
    return LogprobEntry(-0.5 - position, 2, top_ids, top_logprobs)


def named_logprob(token_id: int, position: int) -> float:
    return -0.125 * token_id - position


@dataclass
class ScoringBackend(FakeBackend):
    """Answers every request with one text, or with of(request), followed by an end token."""

    text: str = "Hello, world!"
    of: Callable[[GenerationRequest], list[int]] | None = None
    batch_size: int = 1
    offset: float = 0.0
    """Difference between the log probabilities of consecutive streams."""

    def submit(self, request: GenerationRequest) -> FakeStream:
        ids = token_ids(self.text) if self.of is None else self.of(request)
        self.script = lambda sent: _batches(sent, [*ids, END_TOKEN], self.batch_size, len(self.streams) * self.offset)
        stream: Any = super().submit(request)
        width = request.num_prompt_logprobs
        stream.prompt_logprobs = (
            [entry(token, position, width) for position, token in enumerate(request.token_ids[1:], start=1)]
            if width >= 0
            else []
        )
        return stream  # type: ignore[no-any-return]


def _batches(request: GenerationRequest, ids: list[int], size: int, lowered: float) -> list[TokenBatch]:
    ids = ids[: request.max_tokens]
    finish = Finish.STOP if ids[-1] in request.stop_token_ids else Finish.LENGTH
    for position, token in enumerate(ids):
        if token in request.stop_token_ids:
            ids, finish = ids[: position + 1], Finish.STOP
            break
    width = request.sampling.num_logprobs
    entries = [entry(token, position, max(0, width)) for position, token in enumerate(ids)]
    if named := request.sampling.logprob_token_ids:
        entries = [
            LogprobEntry(each.logprob, each.rank, named, tuple(named_logprob(token, position) for token in named))
            for position, each in enumerate(entries)
        ]
    entries = [LogprobEntry(t.logprob - lowered, t.rank, t.top_ids, t.top_logprobs) for t in entries]
    batches = [
        TokenBatch(ids[start : start + size], logprobs=entries[start : start + size] if width >= 0 else None)
        for start in range(0, len(ids), size)
    ]
    batches[-1].finish = finish
    return batches
