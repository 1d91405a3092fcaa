"""Drafts give the tokens that steps of one token draw."""

from __future__ import annotations

import numpy as np

from penstock.backend.forward_pass import FROM_SLOT, StepBatch, TokenMasks
from tests.backend.sampling.conftest import MakeSampling
from tests.backend.sampling.test_sampler import VOCAB, decode_batch, slot_init


def test_drafts_are_accepted_as_far_as_they_are_drawn_and_masked(sampling: MakeSampling) -> None:
    """One row has penalties, one masks at its first two positions, one no drafts."""
    rng = np.random.default_rng(8)
    inits = (
        slot_init(0, temperature=0.8, seed=1, frequency_penalty=2.0, repetition_penalty=1.5),
        slot_init(1, temperature=0.8, seed=2),
        slot_init(2, temperature=0.8, seed=3),
    )
    logits = rng.normal(size=(3, 4, VOCAB)).astype(np.float32) * 3
    logits[0, 1:] = logits[0, 0]  # it would draw one token again and again
    bits = rng.integers(0, 2**32, (2, -(-VOCAB // 32)), dtype=np.uint32)
    alone, drawn = sampling(VOCAB, 3), []
    for step in range(4):
        masks = TokenMasks(np.array([1], np.int32), bits[step : step + 1]) if step < 2 else None
        batch = decode_batch([0, 1, 2], 9 + step, inits if step == 0 else ())
        alone.begin_step(batch)
        drawn.append(alone.sample(logits[:, step], batch, masks).token_ids.tolist())
    drafts = [[drawn[n][row] for n in range(3)] for row in (0, 1)]
    drafts[0][2] = (drafts[0][2] + 1) % VOCAB
    batch = StepBatch(
        input_ids=np.array([FROM_SLOT, FROM_SLOT, *drafts[0], FROM_SLOT, *drafts[1]], np.int32),
        query_starts=np.array([0, 1, 5, 9], np.int32),
        context_lens=np.full(3, 9, np.int32),
        page_table=np.zeros((3, 1), np.int32),
        slots=np.array([2, 0, 1], np.int32),
        logit_rows=np.arange(3, dtype=np.int32),
        slot_inits=inits,
        drafts=np.array([0, 3, 3], np.int32),
    )
    assert batch.logit_tokens.tolist() == [0, 4, 8, 1, 2, 3, 5, 6, 7]
    order = [logits[2, 0], logits[0, 3], logits[1, 3], *logits[0, :3], *logits[1, :3]]
    sampler = sampling(VOCAB, 3)
    sampler.begin_step(batch)
    output = sampler.sample(np.array(order), batch, TokenMasks(np.array([6, 7], np.int32), bits))
    assert output.num_accepted == (0, 2, 1)
    assert output.token_ids.tolist() == [drawn[0][2], drawn[2][0], drawn[1][1]]
    again = sampler.begin_step(decode_batch([2, 0, 1]))
    assert again.tolist() == output.token_ids.tolist()
