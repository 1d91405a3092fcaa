"""The contract of passes that verify drafts, or guess them as a draft model."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from penstock.backend.engine.steps.draft_model import DraftAsk, DraftModel, num_spare_pages
from penstock.backend.forward_pass import FROM_SLOT, SamplingParams
from penstock.tools.forward_pass_contract.steps import (
    GREEDY,
    MAX_BATCH_TOKENS,
    NUM_PAGES,
    StepRow,
    StepRunner,
    is_same,
    page_size_of,
)


@pytest.fixture
def drafting(forward_pass: Any) -> StepRunner:
    if not forward_pass.spec.generates:
        pytest.skip("this pass generates nothing")
    return StepRunner(forward_pass)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_drafts_give_the_tokens_of_steps_without_them(drafting: StepRunner, *, is_greedy: bool) -> None:
    """Of each step's drafts another number is right. Penalties count the accepted ones, and no others."""
    if not drafting.forward_pass.spec.verifies_drafts:
        pytest.skip("this pass verifies no drafts")
    sampling = GREEDY if is_greedy else SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.6)
    prompt, num_tokens = drafting.random_prompt(11), 14
    shuffled = drafting.rng.permutation(NUM_PAGES).tolist()
    logits, first = drafting.prefill(prompt, shuffled[:20], 1, sampling=sampling)
    expected, their_logits = [first], [logits]
    while len(expected) < num_tokens:
        row = StepRow([FROM_SLOT], len(prompt) + len(expected) - 1, shuffled[:20], 1)
        logits, tokens = drafting.step([row])
        expected.append(int(tokens[0]))
        their_logits.append(logits[0])
    found = [drafting.prefill(prompt, shuffled[20:40], 4, sampling=sampling)[1]]
    vocab_size = drafting.forward_pass.spec.vocab_size
    other, its_pages = drafting.random_prompt(9), shuffled[40:60]
    drafting.prefill(other, its_pages, 9)
    for num_right, num_wrong in ((0, 2), (3, 0), (1, 3), (5, 1)):
        right = expected[len(found) : len(found) + num_right]
        drafts = right + [(expected[len(found) + num_right] + n) % vocab_size for n in range(1, 1 + num_wrong)]
        position = len(prompt) + len(found) - 1
        mine = StepRow([FROM_SLOT, *drafts], position, shuffled[20:40], 4, num_drafts=len(drafts))
        logits, tokens = drafting.step([mine, StepRow([5], len(other), its_pages, 9)])
        assert drafting.num_accepted == (0, num_right)
        if not num_wrong:  # these are the logits after the last draft
            has_same = is_same if drafting.forward_pass.spec.rounds_drafts else np.array_equal
            assert has_same(logits[0], their_logits[len(found) + num_right])
        found += [*right, int(tokens[0])]
    assert found == expected[: len(found)]


def test_pass_continues_a_text_as_a_draft_model(drafting: StepRunner) -> None:
    """It takes a slot again within a text, and goes back behind tokens that were only guessed."""
    forward_pass = drafting.forward_pass
    if forward_pass.spec.kv_windows != (None,) or forward_pass.spec.state_bytes_per_sequence:
        pytest.skip("this pass cannot be a draft model")
    prompt, page_size = drafting.random_prompt(13), page_size_of(forward_pass)
    pages = list(range(NUM_PAGES - num_spare_pages(page_size) - 1, 0, -1))
    text = [*prompt, drafting.prefill(prompt, pages)[1]]
    while len(text) < len(prompt) + 9:
        _, tokens = drafting.step([StepRow([FROM_SLOT], len(text) - 1, pages, 0)])
        text.append(int(tokens[0]))
    model = DraftModel(forward_pass, NUM_PAGES - num_spare_pages(page_size), page_size, MAX_BATCH_TOKENS, 1e-30)
    for known in (len(prompt), len(prompt) + 4, len(prompt) + 2):
        ask = DraftAsk(array("i", text[:known]), len(prompt), pages[: -(-known // page_size)], 0, b"", GREEDY, (), 5)
        assert model.guess([ask], forward_pass.spec.vocab_size).tokens == [text[known : known + 5]]
