"""Drafts change no token with `--deterministic`: in the engine, a step ahead. The contract suite tests steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.backend.engine.steps.draft_desk import DraftDesk
from penstock.backend.engine.steps.draft_model import DraftModel, num_spare_pages
from penstock.backend.forward_pass import MAX_VERIFIED
from penstock.shm.messages import Constraints, Sampling
from tests.backend.engine.test_draft_model import Eager as EagerModel
from tests.backend.engine.test_speculation import Foretold
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.test_pass_in_engine import PAGE_SIZE, AheadBench
from tests.backend.passes.cuda.tiny_models import VOCAB_SIZE, checkpoint, make_driver, options, prompts

if TYPE_CHECKING:
    from penstock.backend.scheduling.drafting import Drafting

ASKS: tuple[dict[str, Any], ...] = (
    {"sampling": Sampling(temperature=0.0, num_logprobs=1)},
    {"sampling": Sampling(temperature=0.6, frequency_penalty=0.3, repetition_penalty=1.1, seed=3)},
    {"sampling": Sampling(temperature=0.4, top_p=0.9, seed=4), "stop_ids": (7, 12)},
    {"constraints": Constraints(allowed_token_ids=tuple(range(40, 90)), bad_words=((41,), (50, 51)))},
)


def load(architecture: str, *, deterministic: bool = True) -> EmulatedCudaPass:
    made = EmulatedCudaPass.load(checkpoint(architecture), replace(options("bf16", 48), deterministic=deterministic))
    create = made.create_cache
    made.create_cache = lambda pages, size, _: create(pages, size, "bf16")  # type: ignore[method-assign]
    return made


def answer_all(architecture: str, num_pages: int, drafting: Drafting | None = None) -> tuple[list[Any], int, int]:
    """Return tokens and log probabilities of all answers, and how many drafts were accepted and sequences preempted."""
    bench = AheadBench(load(architecture), num_pages, drafting=drafting)
    if isinstance(drafting, EagerModel):
        draft_pass = load(architecture, deterministic=False)
        draft_pass.create_cache(num_pages + num_spare_pages(PAGE_SIZE), PAGE_SIZE, "bf16")
        model = DraftModel(draft_pass, num_pages, PAGE_SIZE, 48, 1e-30)
        bench.engine.draft_desk = DraftDesk(model, bench.threads, drafting, bench.scheduler.next_decodes, VOCAB_SIZE)
    for request_id, (prompt, asked) in enumerate(zip(prompts((20, 33, 9, 27), seed=6), ASKS, strict=True)):
        bench.submit(list(prompt), 30 + request_id, request_id=request_id, **asked)
    bench.run_dry()
    answers = [bench.received(request_id) for request_id in range(len(ASKS))]
    facts = [(each.token_ids, each.finishes, [entry and entry.logprob for entry in each.logprobs]) for each in answers]
    counts = bench.board.accepted_tokens, bench.board.preemptions
    bench.close()
    return facts, *counts


@pytest.mark.parametrize("architecture", ["llama3", "gemma4-e"])
def test_answers_are_the_same_with_drafts_and_with_a_draft_model(architecture: str) -> None:
    """With few pages sequences are preempted. The draft model is the model itself, without `--deterministic`."""
    expected, *_ = answer_all(architecture, 32)
    foretold = {request_id: tokens for request_id, (tokens, *_) in enumerate(expected)}
    for num_pages, drafting in ((32, Foretold(foretold)), (9, Foretold(foretold)), (32, EagerModel())):
        found, num_accepted, num_preempted = answer_all(architecture, num_pages, drafting)
        assert found == expected
        assert num_accepted > 20
        assert (num_preempted > 0) is (num_pages == 9)


def test_drafts_beyond_the_limit_and_those_that_are_no_tokens_are_refused() -> None:
    driver = make_driver()
    row = driver.add(prompts((40,))[0])
    batch = replace(driver.build([(row, 40)]), drafts=np.array([MAX_VERIFIED], np.int32))
    with pytest.raises(ValueError, match="29 rows and drafts are sampled; at most 28 may be"):
        driver.forward_pass.forward(batch)
    ids = batch.input_ids.copy()
    ids[-2] = -1
    with pytest.raises(ValueError, match="a draft is -1"):
        driver.forward_pass.forward(replace(batch, input_ids=ids, drafts=np.array([3], np.int32)))
