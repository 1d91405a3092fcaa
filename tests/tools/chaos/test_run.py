"""A run that cannot go on keeps its books."""

from __future__ import annotations

import pytest

from penstock.tools.chaos.errors import ChaosError
from penstock.tools.chaos.ledger import Ledger
from penstock.tools.chaos.plan import Tenant
from penstock.tools.chaos.run import ChaosRun, RunPlan

PLAN = RunPlan(lasts_s=120.0, num_requests=100, drop_rate=0.5, seed=0, concurrency=2, num_recipes=9, fault_every_s=5.0)


async def test_server_that_does_not_recover_ends_the_run_with_an_imbalance(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    run = ChaosRun(PLAN, ["http://127.0.0.1:9"], [Tenant("nobody")], ledger, say=print)

    async def learn(_self: ChaosRun) -> None:
        ledger.open(0, 1)

    async def attack(*_arguments: object) -> None:
        raise ChaosError("/ready was not green for 90 s")

    monkeypatch.setattr(ChaosRun, "_learn", learn)
    monkeypatch.setattr(ChaosRun, "_attack", attack)
    outcome = await run.run()
    assert outcome.ledger.examples == {
        "the run ended early": ["/ready was not green for 90 s"],
        "a request never ended": ["request 0"],
    }


@pytest.mark.parametrize(("lasts_s", "rounds", "quiet"), [(10.0, 2, 1), (180.0, 3, 1), (1800.0, 30, 7)])
def test_last_quarter_of_the_rounds_is_quiet(lasts_s: float, rounds: int, quiet: int) -> None:
    plan = RunPlan(lasts_s, None, 0.5, 0, 2, 9, 5.0)
    assert (plan.num_rounds, plan.num_quiet_rounds) == (rounds, quiet)
