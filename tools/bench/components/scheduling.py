"""`penstock bench scheduling`: CPU time of one turn of the backend's loop, without the device.

A turn takes in the tokens of a step, plans the next one and makes the messages. The loop is the real one, with real
requests, pages and messages. Nothing is sent, and the tokens of a step are there at once (`bare_loop`).
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from penstock.backend.engine.recording.recorder import Recorder
from penstock.shm.memory.ring import RingWriter, create_fd
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
_RING_BYTES = 4_000_000
_TURNS_IN_A_ROW = 10
_NUM_PAIRS = 4


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
    """The longest turn while all waiting requests arrive at once, divided by their number."""
    recorder_us: float
    """Time that the flight recorder adds to the median turn."""

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
        recorder_us = fmean(cost.recorder_us for cost in costs)
        share = recorder_us / (10 * cost.alone.p50_ms)
        run.console.print(f"The flight recorder adds {recorder_us:.1f} µs to a turn, {share:.1f} %.")
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
        with_queue = _measure_turns(loop, num_turns)
        return SchedulingCost(alone, with_queue, arrival_ms, _measure_recorder(num_running, num_turns))
    finally:
        loop.close()
        gc.unfreeze()


def _measure_recorder(num_running: int, num_turns: int) -> float:
    """Microseconds that the recorder adds to a turn.

    Two loops take turns, so that the machine's speed is the same for both. Where their objects are in memory matters as
    much as the recorder does, so it is the mean of several pairs.
    """
    return fmean(_measure_pair(num_running, num_turns, is_first=number % 2 == 0) for number in range(_NUM_PAIRS))


def _measure_pair(num_running: int, num_turns: int, *, is_first: bool) -> float:
    fd = create_fd(_RING_BYTES)
    ring = RingWriter(fd)
    loops = [
        BareLoop(num_running, recorder)
        for recorder in ((Recorder(ring.append), None) if is_first else (None, Recorder(ring.append)))
    ]
    times_ms: tuple[list[float], list[float]] = [], []
    try:
        for loop in loops:
            loop.submit(num_running)
            loop.settle(num_running, _WARM_UP_TURNS)
        for _ in range(0, num_turns, _TURNS_IN_A_ROW):
            for loop, its_times_ms in zip(loops, times_ms, strict=True):
                its_times_ms += [loop.turn_ms() for _ in range(_TURNS_IN_A_ROW)]
    finally:
        for loop in loops:
            loop.close()
        ring.close()
        os.close(fd)
    first_ms, second_ms = map(median, times_ms)
    return 1e3 * (first_ms - second_ms if is_first else second_ms - first_ms)


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
