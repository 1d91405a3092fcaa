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
    "constraints are not rewound": 250,
    "page saves are lost with a plan that cannot be built": 210,
    "page saves are lost with a step without rows": 120,
    "partial pages with bad logits stay findable": 5200,
    "pages with bad logits stay on the host": 320,
    "the grammar of a resumed stream starts over": 140,
    "different seeds share a sequence": 140,
    "resumed requests that are behind start a sequence of their own": 130,
    "embeddings stay behind when a row before theirs is dropped": 130,
    "pages with bad logits stay findable": 110,
}
"""Where the search for a rare bug begins, if not at 0: it takes seconds to minutes from there."""


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
