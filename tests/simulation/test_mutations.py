"""The simulator finds bugs: each planted bug must be found within _MAX_SEEDS worlds."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.planted_pages import PAGE_BUGS
from tests.simulation.planted_pictures import PICTURE_BUGS
from tests.simulation.planted_requests import REQUEST_BUGS
from tests.simulation.planted_steps import STEP_BUGS
from tests.simulation.planted_vectors import VECTOR_BUGS
from tests.simulation.world import run_seed

_MAX_SEEDS = 2000
_PLANTED = REQUEST_BUGS | PAGE_BUGS | STEP_BUGS | VECTOR_BUGS | PICTURE_BUGS
_FIRST_SEEDS = {
    "partial pages with bad logits stay findable": 5993,
    "page saves are lost with a plan that cannot be built": 2168,
    "pixels that one request has lost fail all that share its sequence": 1148,
    "pages with bad logits stay on the host": 439,
    "pages with bad logits stay findable": 439,
    "page saves are lost with a step without rows": 422,
    "a step ends within a picture that is seen whole": 388,
    "constraints are not rewound": 336,
    "different seeds share a sequence": 321,
    "resumed requests that are behind start a sequence of their own": 195,
    "the grammar of a resumed stream starts over": 152,
    "embeddings stay behind when a row before theirs is dropped": 132,
    "a preempted sequence gives up a page that is to be copied": 105,
    "rows that build on a failed step are launched": 99,
    "different numbers of log probabilities share a sequence": 97,
    "log probabilities are kept twice": 94,
    "a state can be found before its step has ended": 91,
    "a state goes on after a rewind": 91,
    "what was scored before a preemption is scored again": 90,
    "tokens are copied before their step is applied": 85,
    "a page copy outlives its row": 78,
    "resumed requests wait in the order in which they arrive": 75,
    "masks do not wait for the previous step": 72,
    "deadlines are ignored in the grammar queue": 72,
    "scored tokens stay where they were when a row is dropped": 55,
    "a resumed stream repeats its tokens": 48,
    "a new subscriber does not end the fast path": 48,
    "bad logits fail the whole step": 48,
    "a page is evicted while it is to be copied": 38,
    "a refused frontend never learns that there is room": 37,
    "a full queue refuses resumed requests": 35,
    "inputs that a client drops keep their rounds": 35,
    "pages of embeddings are found by their token ids": 35,
    "tokens are computed for a subscriber that has left": 31,
    "a page restore outlives its row": 28,
    "pages are saved after the step that overwrites them": 28,
    "requests of a dead frontend stay open": 27,
    "one token too many is taken from a copied page": 22,
    "late masks are those of the token before": 18,
    "tokens sampled without their mask count": 18,
    "tokens take the fast path across a restart": 13,
    "a host place is overwritten before the step has read it": 13,
    "vectors of a step are mixed up": 13,
    "only the first of several keys unparks sequences": 12,
    "sequences are not looked at again when their picture is encoded": 12,
    "newcomers go before what had run": 11,
    "one tenant fills the queue for all": 8,
    "a sequence that goes on after a stop is not rewound": 8,
    "pages are not restored": 8,
    "restored pages count as computed before they are restored": 8,
    "a failed step counts as computed": 8,
    "a scored prompt begins with cached tokens": 8,
    "a failed step fails all its requests": 8,
    "steps in flight count after a restart": 7,
    "a parked sequence is never unparked": 6,
    "a chunk's embeddings are the prompt's first": 6,
    "adapters share pages": 6,
    "different stop ids share a sequence that forbids them": 4,
    "tenants share pages": 4,
    "a later chunk of a picture has its first embeddings": 4,
    "different penalties share a sequence": 3,
    "the slot is not initialized after a restart": 3,
    "a request that failed at intake stays open": 3,
    "the next plan waits for a failed step": 3,
    "rows are bound when planned, not when launched": 3,
    "page hashes ignore the pages before": 2,
    "a slot keeps the adapter of its previous sequence": 2,
    "tenants share sequences": 1,
    "tokens take the fast path beyond the first limit": 1,
    "a replay leaves out the first token": 1,
    "a prefix hit leaves nothing to compute": 1,
    "the page table keeps the pages of the slot's previous sequence": 1,
}
"""The world where the search for a bug begins, if not at 0: from 0 all searches take minutes."""


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
