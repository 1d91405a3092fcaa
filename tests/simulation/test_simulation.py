"""Thousands of worlds, each decided by its seed. `pytest tests/simulation --seed N` runs one and prints its log."""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.world import run_seed
from tests.tallies import SIMULATED

_CHUNK = 100
_MAX_FAILURES = 5

# Events that must occur: name → at least once per this many seeds on average.
_MUST_OCCUR = {
    "preempted and resumed": 20,
    "joined": 5,
    "joined late": 20,
    "prefix found": 5,
    "parked": 20,
    "page copied": 5,
    "saved to the host": 5,
    "saved for a step without rows": 100,
    "restored from the host": 10,
    "planned late": 1,
    "stopped waiting": 100,
    "passed": 20,
    "admitted after being passed": 20,
    "bisected": 20,
    "failed by an engine error": 20,
    "engine error: add": 50,
    "engine error: note": 50,
    "engine error: build": 50,
    "engine error: deliver": 50,
    "engine error: step": 50,
    "rewound": 10,
    "rows bound late": 5,
    "credit spent": 20,
    "resumed": 50,
    "groups resumed": 20,
    "backend restarts": 20,
    "drained": 100,
    "suspended": 200,
    "frontend deaths": 20,
    "dropped in a storm": 20,
    "fault: raise": 50,
    "fault: raise late": 50,
    "fault: nan": 50,
    "fault: poison": 50,
    "fault: miscount": 50,
    "fault: raise at wait": 50,
    "launched ahead": 1,
    "drafts accepted": 3,
    "asked the draft model": 10,
    "drafts rejected": 3,
    "awaited for its constraints": 2,
    "grammars compiled": 5,
    "masks late": 20,
    "joined with constraints": 10,
    "joined for log probabilities": 10,
    "resumed with constraints": 50,
    "log probabilities": 1,
    "scored": 2,
    "embedded": 2,
    "resumed with embeddings": 50,
    "encoded": 2,
    "encoding: BadPixels": 50,
    "encoding: EncodingCancelled": 200,
    "encoding: PlantedFault": 20,
    "joined with pictures": 20,
    "killed in the tower": 20,
    "pictures found again": 50,
    "resumed with pictures": 20,
    "cancel while encoding": 50,
    "vectors": 5,
    "vectors shared": 20,
    "vectors kept": 50,
    "vectors computed again": 50,
    "requests with several inputs": 10,
    "inputs dropped halfway": 100,
    "room announced": 100,
    "ended by its grammar": 20,
    "refused BAD_GRAMMAR": 20,
    "refused INTERNAL": 100,
    "refused NO_ADAPTER": 20,
    "refused TOO_LATE": 50,
    "quoted": 20,
    "quoted in a later turn": 20,
    "cancel while waiting for a quote": 100,
    "cancel while compiling": 50,
    "ended STOP": 5,
    "ended LENGTH": 5,
    "ended EXPIRED": 20,
    "ended FAILED": 20,
    "refused OVERLOADED": 20,
    "refused over its share": 20,
    "admitted before newcomers": 20,
    "refused SHUTTING_DOWN": 100,
    "refused BAD_TOKEN": 20,
    "refused CONTEXT_TOO_LONG": 20,
    "cancel of nothing open": 20,
    "cancel of a shared sequence": 50,
    "cancel while waiting": 20,
    "cancel while parked": 400,
    "cancel in prefill": 20,
    "cancel in decode": 20,
    "cancel while preempted": 400,
    "cancel while finishing": 200,
}


def run_seeds(first: int, last: int) -> tuple[Counter[str], dict[int, str]]:
    """Run seeds first … last - 1. Returns how often each thing occurred, and the errors by seed."""
    logging.disable(logging.CRITICAL)
    covered: Counter[str] = Counter()
    failures: dict[int, str] = {}
    for seed in range(first, last):
        try:
            covered += run_seed(seed)
        except Exception as error:  # noqa: BLE001 - reported with its seed
            failures[seed] = "".join(traceback.format_exception_only(error)).strip()
    logging.disable(logging.NOTSET)
    return covered, failures


@pytest.mark.timeout(1800)
def test_every_request_receives_its_tokens_and_its_end_whatever_happens(
    pytestconfig: pytest.Config, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seed = pytestconfig.getoption("--seed")
    if seed is not None:
        with capsys.disabled():
            run_seed(seed, print)
        return
    num_seeds = pytestconfig.getoption("--seeds")
    everything: Counter[str] = Counter()
    failures: dict[int, str] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=context) as workers:
        firsts = range(0, num_seeds, _CHUNK)
        lasts = [min(first + _CHUNK, num_seeds) for first in firsts]
        for covered, failed in workers.map(run_seeds, firsts, lasts):
            everything.update(covered)
            failures |= failed
    record_property(SIMULATED, {**everything, "seeds": num_seeds})
    reports = [f"--seed {seed}: {failures[seed]}" for seed in sorted(failures)[:_MAX_FAILURES]]
    assert not failures, f"{len(failures)} of {num_seeds} seeds fail:\n" + "\n".join(reports)
    missed = {name: every for name, every in _MUST_OCCUR.items() if everything[name] < num_seeds // every}
    assert not missed, f"these occurred too seldom: {[(name, everything[name]) for name in missed]}"


@pytest.mark.parametrize("seed", [0, 1, 2, 1007])  # 1007: a step cannot be launched behind one that runs
def test_seed_gives_the_same_run_every_time(seed: int) -> None:
    stories: list[list[str]] = [[], []]
    for story in stories:
        run_seed(seed, story.append)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 20
