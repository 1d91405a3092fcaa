"""Simulated fleets: no request is lost, and a policy finds the prefixes that it promises to find."""

from __future__ import annotations

from functools import cache

import pytest

from penstock.tools.bench.replicas.fleet_routing import POLICIES
from penstock.tools.bench.replicas.fleet_simulation import Fleet, FleetResult, Traffic

TRAFFIC = Traffic(requests_per_backend=24, rate_per_backend_s=90.0, groups_per_backend=4)


@cache
def run(name: str, num_backends: int = 5, *, num_deaths: int = 0) -> FleetResult:
    return Fleet(num_backends, POLICIES[name](num_backends), TRAFFIC, num_deaths=num_deaths).run(name, seed=1)


@pytest.mark.parametrize("name", ["hash ring", "prefix table", "cells"])
def test_routing_by_prefix_computes_nearly_each_prefix_once(name: str) -> None:
    found, elsewhere = run(name), run("round robin")
    assert found.requests == 120
    assert found.hit_rate <= found.best_hit_rate
    assert found.hit_rate > 0.9 * found.best_hit_rate
    assert found.hit_rate > elsewhere.hit_rate + 0.1


@pytest.mark.parametrize("name", POLICIES)
def test_streams_of_dead_backends_go_on_elsewhere(name: str) -> None:
    found = run(name, num_deaths=2)  # a lost stream would fail the run
    assert found.moved > 0


def test_the_same_seed_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.thread_time_ns", lambda: 0)  # the loop plans earlier if planning takes long
    first, second = (run.__wrapped__("cells", num_deaths=2) for _ in range(2))
    assert (first.hit_rate, first.ttft_p99_ms, first.moved) == (second.hit_rate, second.ttft_p99_ms, second.moved)
