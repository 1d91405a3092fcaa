"""Damaged models are refused in one line or run; a load that does harm is found."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.backend.errors import StartupError
from penstock.tools.chaos.bad_models import loader
from penstock.tools.chaos.bad_models.fuzz import MAX_GROWTH_BYTES, fuzz, judge, make_models_dir
from penstock.tools.chaos.bad_models.good_models import make_good_models
from penstock.tools.chaos.bad_models.loader import Verdict, load_apart
from penstock.tools.chaos.bad_models.mutations import Sample, draw_sample

SAMPLE = Sample(3, "config.json: ['x'] = 1", {})


def test_short_form_finds_no_fault() -> None:
    outcome = fuzz(20, seed=7, lasts_s=600.0, keep=None, say=print)
    assert outcome.faults == []
    assert outcome.counts.total() == 20
    assert outcome.counts["ran"] >= 4
    assert outcome.counts["refused in one line"] >= 7


def test_same_seed_damages_the_same_way_and_another_one_differs(tmp_path: Path) -> None:
    models = make_good_models()
    first, again, other = ([draw_sample(seed, index, models) for index in range(30, 90)] for seed in (1, 1, 2))
    assert first == again
    assert [sample.told for sample in first] != [sample.told for sample in other]
    assert {sample.told.partition(":")[0] for sample in first} == {model.name for model in models}
    folder = make_models_dir(tmp_path, 3, seed=1)
    assert {"bad-8", "bad-9", "bad-10", "llama", "gguf.gguf"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("verdict", "how"),
    [
        (Verdict(0, "", 1.0), "ran"),
        (Verdict(1, "config.json: x is 1", 1.0), "refused in one line"),
        (Verdict(1, "config.json:\nx is 1", 1.0), "refused badly"),
        (Verdict(1, "", 1.0), "refused badly"),
        (Verdict(0, "", 1.0, MAX_GROWTH_BYTES + 1), "took too much memory"),
        (Verdict(-11, "", 1.0), "ended by a signal"),
        (Verdict(2, "Traceback", 1.0), "failed"),
    ],
)
def test_harm_is_named(verdict: Verdict, how: str) -> None:
    found, wrong = judge(SAMPLE, verdict)
    assert found == how
    assert bool(wrong) == (how not in ("ran", "refused in one line"))


def _refuse(_model: Path, _adapter: Path | None) -> NoReturn:
    raise StartupError("x\nis 1")


def _raise(_model: Path, _adapter: Path | None) -> NoReturn:
    raise KeyError("x")


def _panic(_model: Path, _adapter: Path | None) -> None:
    os.write(2, b"thread panicked at x")


def _crash(_model: Path, _adapter: Path | None) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def _hang(_model: Path, _adapter: Path | None) -> None:
    signal.pause()


def _swallow_memory(_model: Path, _adapter: Path | None) -> None:
    bytearray(2 * loader.MAX_ADDRESS_BYTES)


@pytest.mark.parametrize(
    ("load", "status", "told"),
    [
        (_refuse, 1, r"x\nis 1"),
        (_raise, 2, "KeyError: 'x'"),
        (_panic, 2, "thread panicked"),
        (_crash, -signal.SIGUSR1, ""),
        (_hang, -signal.SIGKILL, "it had not ended"),
        (_swallow_memory, 2, "MemoryError"),
    ],
)
def test_child_that_loads_cannot_hurt_the_loader(
    monkeypatch: pytest.MonkeyPatch, load: object, status: int, told: str
) -> None:
    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(loader, "TIME_LIMIT_S", 0.2 if load is _hang else 60.0)
    verdict = load_apart(Path("model"), None)
    assert verdict.status == status
    assert told in verdict.told
