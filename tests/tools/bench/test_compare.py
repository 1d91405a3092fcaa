"""Rounds that take turns: which are repeated, and what is computed from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness import foreign_cpu
from penstock.tools.bench.harness.comparison import Figures, compared_rows, warnings
from penstock.tools.bench.harness.foreign_cpu import Disturbance, ForeignCpu, WatchedRound, machine_cpu_s
from penstock.tools.bench.load_generator.stats import ObservedRequest, Outcome, summarize
from penstock.tools.bench.serving.compare import parse_peers


def watched(lasted_s: float, ttft_s: float, *, tokens: int = 10, foreign_cores: float = 0.0) -> WatchedRound:
    """A round of one stream whose second event comes 0.25 s after the first."""
    events_s = [ttft_s, ttft_s + 0.25][:tokens]
    record = ObservedRequest(0.0, events_s, lasted_s, 4, tokens, Outcome.COMPLETED)
    return WatchedRound(summarize("c=1", [record], 0.0), foreign_cores)


def test_ratios_are_medians_of_the_ratios_of_each_round() -> None:
    found = {
        "penstock": [watched(1.0, 0.5), watched(2.0, 0.5), watched(4.0, 0.125)],
        "x": [watched(2.0, 0.5), watched(1.0, 0.25), watched(2.0, 0.5)],
    }
    ours, theirs = compared_rows(1, found, Disturbance(0.1, 0))
    assert ours.ratios is None
    assert ours.medians == Figures(5.0, 500.0, 250.0)
    assert theirs.medians == Figures(5.0, 500.0, 250.0)
    assert theirs.ratios == Figures(0.5, 1.0, 1.0)  # of 2, 0.5 and 0.5; of 1, 2 and 0.25


def test_figure_without_events_has_no_ratio() -> None:
    found = {"penstock": [watched(1.0, 0.5)], "x": [watched(1.0, 0.5, tokens=1)]}
    _, theirs = compared_rows(1, found, Disturbance(0.1, 0))
    assert theirs.medians == Figures(1.0, 500.0, None)
    assert theirs.ratios == Figures(10.0, 1.0, None)


def test_disturbed_rounds_and_errors_are_named() -> None:
    failed = WatchedRound(summarize("c=1", [ObservedRequest(0.0, ended_s=1.0, error="status 500")], 0.0), 0.0)
    found = {"penstock": [watched(1.0, 0.5), watched(1.0, 0.5, foreign_cores=0.2)], "x": [failed, failed]}
    assert list(warnings(compared_rows(4, found, Disturbance(0.1, 0)))) == [
        "c=4, penstock: 1 of 2 rounds were disturbed in every attempt",
        "c=4, x: first error: status 500",
    ]


def test_answers_of_another_length_are_named() -> None:
    found = {"penstock": [watched(1.0, 0.5)], "same": [watched(2.0, 0.5)], "short": [watched(1.0, 0.5, tokens=7)]}
    assert list(warnings(compared_rows(1, found, Disturbance(0.1, 0)))) == [
        "c=1, short: 4 prompt and 7 output tokens a request, but 4 prompt and 10 output tokens with penstock"
    ]


@pytest.mark.parametrize(("peers", "reason"), [([], "at least one"), (["a"] * 2, "name of"), (["penstock"], "name of")])
def test_servers_have_different_names(peers: list[str], reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        parse_peers([f"{name}=run,http://127.0.0.1:1" for name in peers])


class ScriptedMachine:
    """Attempts of a round, and looks at the machine between them, with given foreign CPU times."""

    def __init__(self, *foreign_cores: float) -> None:
        self.done: list[str] = []
        self._foreign_cores: Iterator[float] = iter(foreign_cores)

    async def attempt(self) -> WatchedRound:
        self.done.append("attempt")
        return watched(1.0, 0.5, foreign_cores=next(self._foreign_cores))

    def cores(self) -> float:
        self.done.append("look")
        return next(self._foreign_cores)


@pytest.fixture
def disturbance(monkeypatch: pytest.MonkeyPatch) -> Disturbance:
    monkeypatch.setattr(foreign_cpu, "_QUIET_S", 0.0)
    return Disturbance(limit_cores=0.1, max_repeats=2)


async def test_undisturbed_round_is_not_repeated(disturbance: Disturbance) -> None:
    machine = ScriptedMachine(0.1)
    found = await disturbance.repeat(machine.attempt)
    assert (found.foreign_cores, found.attempts) == (0.1, 1)


async def test_disturbed_round_is_repeated_once_the_machine_is_quiet(
    disturbance: Disturbance, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ScriptedMachine(0.5, 0.4, 0.3, 0.0, 0.05)
    monkeypatch.setattr(foreign_cpu, "ForeignCpu", lambda: machine)
    found = await disturbance.repeat(machine.attempt)
    assert machine.done == ["attempt", "look", "look", "look", "attempt"]
    assert (found.foreign_cores, found.attempts) == (0.05, 2)


async def test_least_disturbed_round_counts_if_all_are_disturbed(
    disturbance: Disturbance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_cpu, "_MAX_WAIT_S", 0.0)
    machine = ScriptedMachine(0.5, 0.3, 0.4)
    found = await disturbance.repeat(machine.attempt)
    assert machine.done == ["attempt"] * 3
    assert (found.foreign_cores, found.attempts) == (0.3, 3)
    assert disturbance.has_disturbed(found)


def test_foreign_cpu_is_what_neither_the_benchmark_nor_its_children_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own_cpu = iter([10.0, 12.0]), iter([1.0, 1.5])
    machine = iter([100.0, 104.0])
    children = {7: iter([20.0, 21.0]), 8: iter([1.0, 1.5])}
    monkeypatch.setattr(
        foreign_cpu, "time", SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(own_cpu))
    )
    monkeypatch.setattr(foreign_cpu, "machine_cpu_s", lambda: next(machine))
    monkeypatch.setattr(foreign_cpu, "tree_cpu_s", lambda pid: next(children[pid]))
    assert ForeignCpu(7, 8).cores() == pytest.approx((4.0 - 1.5 - 0.5) / 2.0)


def test_cpu_time_of_the_machine_includes_this_process() -> None:
    before_s, until_s = machine_cpu_s(), time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    assert machine_cpu_s() - before_s >= 0.2
