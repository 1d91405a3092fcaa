"""A draft model changes no token, whatever it guesses, and is asked where that pays."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backend.engine.steps.draft_model import DraftAsk, DraftModel, num_spare_pages
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import SamplingParams, StepBatch
from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.passes.fake import FakePass
from penstock.backend.scheduling.model_drafting import MAX_OF_MODEL, ModelDrafting
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.messages import Constraints, Sampling
from tests.backend.harness import Bench, expected_tokens

VOCAB_SIZE = 97
GREEDY = SamplingParams(temperature=0.0)
ASKS: tuple[dict[str, Any], ...] = (
    {},
    {"stop_ids": (7, 12, 50)},
    {"sampling": Sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.1)},
    {"sampling": Sampling(temperature=0.9, top_p=0.9, seed=4)},
    {"constraints": Constraints(allowed_token_ids=tuple(range(40, 90)), bad_words=((41,), (50, 51)))},
    {"sampling": Sampling(temperature=0.0, num_logprobs=1)},
)


class OftenRight(FakePass):
    """Of three tokens one is another than the target's. Counts its tokens."""

    num_tokens = 0

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        self.num_tokens += batch.num_tokens
        logits = super().forward(batch)
        wrong = logits.argmax(axis=1) % 3 == 0
        logits[wrong] = np.roll(logits[wrong], 1, axis=1)
        return logits


class Eager(ModelDrafting):
    """Always wants guesses, and drafts all."""

    def __init__(self, texts: EarlierTexts | None = None) -> None:
        super().__init__(StepTiming(), texts, 1000)

    def _best_length(self, num_rows: int, rows: list[Sequence]) -> int:  # noqa: ARG002
        return MAX_OF_MODEL

    def _best_count(self, num_rows: int, chances: list[float]) -> int:  # noqa: ARG002
        return len(chances)


@pytest.mark.parametrize("num_pages", [200, 26])
@pytest.mark.parametrize("draft_class", [FakePass, OftenRight])
def test_answers_are_the_same_with_a_draft_model(draft_class: type[FakePass], num_pages: int) -> None:
    """With few pages sequences are preempted, and others take their pages."""
    answers = []
    for drafts in (False, True):
        options: dict[str, Any] = {"drafting": Eager(), "draft_pass": draft_class(VOCAB_SIZE, 4)} if drafts else {}
        bench = Bench(num_pages=num_pages if drafts else 200, max_running=4, **options)
        for request_id, asked in enumerate(ASKS):
            bench.submit(list(range(3, 14 + request_id)), 40 + request_id, request_id=request_id, **asked)
        bench.run_dry()
        assert (bench.board.accepted_tokens > 20) is drafts
        assert (bench.board.preemptions > 0) is (num_pages < 50 and drafts)
        assert bench.pool.num_held == 0
        answers.append([bench.received(request_id).token_ids for request_id in range(len(ASKS))])
        bench.close()
    assert answers[0] == answers[1]
