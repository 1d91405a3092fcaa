"""Tenants that always have work waiting, on the real engine: how far apart their service may be.

The paper (arXiv 2401.00588, theorem 4.4) bounds the difference between two tenants that wait all the while by twice
U = max(prefill cost × longest prompt, decode cost × tokens of a batch). Here a prompt is computed in parts, so a step's
budget takes the place of the longest prompt. A tenant is ahead by what its running sequences still generate after its
turn has passed, divided by its weight; where pages are few, also by what may pass a sequence that does not fit.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from penstock.backend.scheduling.admission import _MAX_PASSING
from penstock.backend.scheduling.tenants import DECODE_COST, PREFILL_COST
from penstock.shm.messages import Sampling
from tests.backend.harness import Bench
from tests.simulation.violations import Violation

if TYPE_CHECKING:
    from penstock.backend.scheduling.step_plan import Plan

_TURNS = 350
_BACKLOG = 4
"""Each tenant has at least this many sequences waiting."""
_MAX_RUNNING, _MAX_BATCH_TOKENS = 6, 24
_FEW_PAGES, _ENOUGH_PAGES = 60, 400
_HOT = Sampling(temperature=1.0)
_EARLY = b"early"
"""A tenant with one request, so that another is charged before the last one arrives. A lone tenant is not charged."""
_EARLY_TOKENS = 100


class TenantsWorld:
    """One seed's tenants. Service is counted from the plans' rows, not taken from the scheduler."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.weights = {name: self.rng.choice((0.5, 1.0, 2.0)) for name in (b"one", b"two", b"other")}
        self.longest = {name: (self.rng.choice((6, 60)), self.rng.choice((3, 24))) for name in self.weights}
        self.num_pages = self.rng.choice((_FEW_PAGES, _ENOUGH_PAGES, _ENOUGH_PAGES))
        # A tenant alone is not charged: "other" is there so that "one" is, before "two" arrives.
        self.arrives_at = {b"one": 0, b"other": 0, b"two": self.rng.choice((0, 120))}
        self.service = dict.fromkeys(self.weights, 0.0)
        self.bench = Bench(
            num_pages=self.num_pages, page_size=4, max_running=_MAX_RUNNING, max_batch_tokens=_MAX_BATCH_TOKENS
        )
        self.num_asked = 0
        plan = self.bench.scheduler.plan

        def counted_plan() -> Plan:
            made = plan()
            for row in made.rows():
                if row.sequence.tenant == _EARLY:
                    continue
                is_decode = row.end > row.sequence.num_given_tokens
                cost = DECODE_COST if is_decode else PREFILL_COST * (row.end - row.start)
                self.service[row.sequence.tenant] += cost / self.weights[row.sequence.tenant]
            return made

        self.bench.scheduler.plan = counted_plan  # type: ignore[method-assign]

    @property
    def bound(self) -> float:
        """2 U, of the tenant with the lesser weight."""
        most_left = DECODE_COST * _MAX_RUNNING * max(output for _, output in self.longest.values())
        longest = max(prompt for prompt, _ in self.longest.values())
        passing = 0 if self.num_pages == _ENOUGH_PAGES else _MAX_PASSING * longest
        return 2 * (PREFILL_COST * (_MAX_BATCH_TOKENS + passing) + most_left) / min(self.weights.values())

    def run(self) -> None:
        """Raises Violation when the tenants drift apart, or a request never ends."""
        try:
            leads: list[float] = []
            if any(self.arrives_at.values()):
                self._submit(_EARLY, [1, 2, 3], _EARLY_TOKENS, 1.0)
            for turn in range(_TURNS):
                self._refill(turn)
                self.bench.turn()
                if turn > max(self.arrives_at.values()):
                    leads.append(self.service[b"one"] - self.service[b"two"])
                    if max(leads) - min(leads) > self.bound:
                        raise Violation(f"the tenants' service drifts apart by more than {self.bound:.0f}")
            try:
                self.bench.run_dry()
            except AssertionError as error:
                raise Violation(str(error)) from None
        finally:
            self.bench.close()

    def _refill(self, turn: int) -> None:
        waiting = [sequence.tenant for sequence in self.bench.scheduler._waiting.sequences()]
        for tenant, (longest_prompt, longest_output) in self.longest.items():
            if turn < self.arrives_at[tenant]:
                continue
            for _ in range(_BACKLOG - waiting.count(tenant)):
                prompt = [self.rng.randrange(97) for _ in range(self.rng.randint(1, longest_prompt))]
                self._submit(tenant, prompt, self.rng.randint(1, longest_output), self.weights[tenant])

    def _submit(self, tenant: bytes, prompt: list[int], count: int, weight: float) -> None:
        options = {"tenant": tenant, "salt": tenant, "weight": weight, "sampling": _HOT}
        self.bench.submit(prompt, count, request_id=self.num_asked, **options)  # type: ignore[arg-type]
        self.num_asked += 1
