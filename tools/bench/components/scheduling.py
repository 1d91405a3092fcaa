"""`penstock bench scheduling`: CPU time of one turn of the backend's loop, without the device.

A turn takes in the tokens of a step, plans the next one and makes the messages. The loop is the real one, with real
requests, pages and messages. Nothing is sent, and the tokens of a step are there at once (`bare_loop`).
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.tools.bench.components.bare_loop import BareLoop
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.options import ReportOptions, RoundOptions

if TYPE_CHECKING:
    from rich.table import Table

_WARM_UP_TURNS = 50
P50_LIMIT_MS = 0.25
P99_LIMIT_MS = 1.0
WAITING_LIMIT_MS = 0.1


@dataclass(frozen=True, slots=True)
class TurnCost:
    """CPU time of the thread, for a turn that applies one step and plans the next while all sequences decode."""

    running: int
    waiting: int
    turns: int
    p50_ms: float
    p99_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    alone: TurnCost
    with_queue: TurnCost
    """The same sequences run, and many more requests wait."""
    arrival_ms: float
    """The longest turn while all of those arrive at once, divided by their number."""

    def aims(self) -> list[Aim]:
        added_ms = self.with_queue.p50_ms - self.alone.p50_ms
        name = f"scheduling pass of {self.alone.running} sequences"
        return [
            Aim(f"{name}, ms p50", self.alone.p50_ms, "at most", P50_LIMIT_MS),
            Aim(f"{name}, ms p99", self.alone.p99_ms, "at most", P99_LIMIT_MS),
            Aim(f"{self.with_queue.waiting} waiting add to it, ms p50", added_ms, "at most", WAITING_LIMIT_MS),
        ]


def scheduling(*, rounds: RoundOptions = RoundOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run:
        with run.status("turns of the loop without a device"):
            costs = [measure_scheduling() for _ in range(rounds.rounds)]
        costs.sort(key=lambda cost: cost.alone.p50_ms)
        cost = costs[len(costs) // 2]
        run.add("scheduling", cost, scheduling_table(cost), cost.aims())
        arrivals = f"{cost.with_queue.waiting:,} requests that arrive at once"
        run.console.print(f"Taking in {arrivals}: {cost.arrival_ms:.3f} ms of a turn for each.")
    return run.exit_status


def measure_scheduling(num_running: int = 256, num_waiting: int = 10_000, num_turns: int = 1000) -> SchedulingCost:
    """num_turns is at most 1,900: twice that many and the warm-up must fit the context."""
    loop = BareLoop(num_running)
    # The backend does the same when it is ready.
    gc.collect()
    gc.freeze()
    try:
        loop.submit(num_running)
        loop.settle(num_running, _WARM_UP_TURNS)
        alone = _measure_turns(loop, num_turns)
        loop.submit(num_waiting)
        arrival_ms = max(loop.turn_ms() for _ in range(_WARM_UP_TURNS)) / num_waiting
        return SchedulingCost(alone, _measure_turns(loop, num_turns), arrival_ms)
    finally:
        loop.close()
        gc.unfreeze()


def _measure_turns(loop: BareLoop, num_turns: int) -> TurnCost:
    times_ms = sorted(loop.turn_ms() for _ in range(num_turns))
    return TurnCost(
        running=loop.num_running,
        waiting=loop.num_waiting,
        turns=num_turns,
        p50_ms=times_ms[num_turns // 2],
        p99_ms=times_ms[num_turns * 99 // 100],
        worst_ms=times_ms[-1],
    )


def scheduling_table(cost: SchedulingCost) -> Table:
    table = make_table("A turn of the loop, without the device", "running", "waiting", "p50 ms", "p99 ms", "worst ms")
    for turn in (cost.alone, cost.with_queue):
        times = (turn.p50_ms, turn.p99_ms, turn.worst_ms)
        table.add_row(str(turn.running), f"{turn.waiting:,}", *(f"{time_ms:.3f}" for time_ms in times))
    return table
