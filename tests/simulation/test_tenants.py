"""Two tenants that always wait get service by their weights, within the paper's bound, and no request starves."""

from __future__ import annotations

import pytest

from tests.simulation.planted_tenants import TENANT_BUGS
from tests.simulation.tenants_world import TenantsWorld
from tests.simulation.violations import Violation

_FIRST_SEEDS = {
    "generated tokens are free": 2,
    "weights are ignored": 3,
    "a newcomer has saved up service": 4,
    "a sequence that does not fit is never looked at again": 1,
}
"""The world where the search for a bug begins, if not at 0."""
_NUM_WORLDS = 6


@pytest.mark.parametrize("seed", range(1, 5))
def test_waiting_tenants_do_not_drift_apart(seed: int) -> None:
    TenantsWorld(seed).run()


@pytest.mark.parametrize("name", TENANT_BUGS)
def test_planted_bug_makes_tenants_drift_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    TENANT_BUGS[name](monkeypatch)
    for seed in range(first := _FIRST_SEEDS.get(name, 0), first + _NUM_WORLDS):
        try:
            TenantsWorld(seed).run()
        except Violation:
            return
    pytest.fail(f"{_NUM_WORLDS} worlds did not find the planted bug: {name}")
