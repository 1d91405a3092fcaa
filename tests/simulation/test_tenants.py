"""Two tenants that always wait get service by their weights, within the paper's bound, and no request starves."""

from __future__ import annotations

import pytest

from tests.simulation.planted_tenants import TENANT_BUGS
from tests.simulation.tenants_world import TenantsWorld
from tests.simulation.violations import Violation

_SEEDS = range(6)


@pytest.mark.parametrize("seed", _SEEDS)
def test_waiting_tenants_do_not_drift_apart(seed: int) -> None:
    TenantsWorld(seed).run()


@pytest.mark.parametrize("name", TENANT_BUGS)
def test_planted_bug_makes_tenants_drift_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    TENANT_BUGS[name](monkeypatch)
    for seed in _SEEDS:
        try:
            TenantsWorld(seed).run()
        except Violation:
            return
    pytest.fail(f"{len(_SEEDS)} worlds did not find the planted bug: {name}")
