"""The simulator finds bugs: each planted bug must be found within _MAX_SEEDS worlds."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.planted_pages import PAGE_BUGS
from tests.simulation.planted_requests import REQUEST_BUGS
from tests.simulation.planted_steps import STEP_BUGS
from tests.simulation.planted_vectors import VECTOR_BUGS
from tests.simulation.world import run_seed

_MAX_SEEDS = 2000
_PLANTED = REQUEST_BUGS | PAGE_BUGS | STEP_BUGS | VECTOR_BUGS
_FIRST_SEEDS = {
    "partial pages with bad logits stay findable": 5992,
    "page saves are lost with a plan that cannot be built": 907,
    "different seeds share a sequence": 674,
    "a page restore outlives its row": 662,
    "page saves are lost with a step without rows": 531,
    "pages with bad logits stay on the host": 531,
    "pages with bad logits stay findable": 387,
    "constraints are not rewound": 325,
    "resumed requests that are behind start a sequence of their own": 195,
    "the grammar of a resumed stream starts over": 152,
    "embeddings stay behind when a row before theirs is dropped": 130,
    "a preempted sequence gives up a page that is to be copied": 100,
    "log probabilities are kept twice": 90,
    "rows that build on a failed step are launched": 90,
    "tokens are copied before their step is applied": 85,
    "resumed requests wait in the order in which they arrive": 74,
    "what was scored before a preemption is scored again": 65,
    "different numbers of log probabilities share a sequence": 60,
    "scored tokens stay where they were when a row is dropped": 55,
    "a page copy outlives its row": 55,
    "a resumed stream repeats its tokens": 45,
    "a new subscriber does not end the fast path": 45,
    "bad logits fail the whole step": 45,
    "a page is evicted while it is to be copied": 37,
    "a full queue refuses resumed requests": 35,
    "a refused frontend never learns that there is room": 35,
    "inputs that a client drops keep their rounds": 35,
    "pages of embeddings are found by their token ids": 35,
    "tokens are computed for a subscriber that has left": 26,
    "a state goes on after a rewind": 25,
    "pages are saved after the step that overwrites them": 21,
    "one token too many is taken from a copied page": 20,
    "masks do not wait for the previous step": 20,
    "deadlines are ignored in the grammar queue": 15,
    "late masks are those of the token before": 15,
    "tokens sampled without their mask count": 15,
}
"""The world where the search for a bug begins, if not at 0: from 0 it takes seconds to minutes."""


@pytest.mark.parametrize("name", _PLANTED)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _PLANTED[name](monkeypatch)
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(first := _FIRST_SEEDS.get(name, 0), first + _MAX_SEEDS):
            try:
                run_seed(seed)
            except Exception:  # noqa: BLE001 - any check may find it
                return
    finally:
        logging.disable(logging.NOTSET)
    pytest.fail(f"{_MAX_SEEDS} worlds did not find the planted bug: {name}")
