"""What one turn of the backend's loop costs without the device: taking in a step's tokens, planning the next, sending.

The loop is the real one, with real requests, pages and messages. In the place of the sockets nothing is sent, and in
the place of the device a step's tokens are there at once; making them is not timed.
"""

from __future__ import annotations

import gc
import itertools
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.executor import StepResult
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.requests import EngineLimits, Requests
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.shm.link.events import Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import Sampling, Submit
from penstock.tools.bench.components.unsent_link import CONTEXT_TOKENS, NUM_FRONTENDS, UnsentLink
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.options import ReportOptions, RoundOptions

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan

_PAGE_SIZE_TOKENS = 32
_PROMPT_TOKENS = 64
_VOCAB_SIZE = 32_000
_WARM_UP_TURNS = 50
P50_LIMIT_MS = 0.25
P99_LIMIT_MS = 1.0
WAITING_LIMIT_MS = 0.1


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Milliseconds of a turn that applies one step and plans the next, all running sequences decoding.

    They are the thread's own: what other processes take of a busy machine does not count.
    """

    running: int
    waiting: int
    turns: int
    p50_ms: float
    p99_ms: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class SchedulingCost:
    alone: TurnCost
    crowded: TurnCost
    """The same sequences run, and many more wait."""
    arrival_ms: float
    """The longest turn while all of those came at once and found their places, per request that came."""

    def aims(self) -> list[Aim]:
        added_ms = self.crowded.p50_ms - self.alone.p50_ms
        name = f"scheduling pass of {self.alone.running} sequences"
        return [
            Aim(f"{name}, ms p50", self.alone.p50_ms, "at most", P50_LIMIT_MS),
            Aim(f"{name}, ms p99", self.alone.p99_ms, "at most", P99_LIMIT_MS),
            Aim(f"{self.crowded.waiting} waiting add to it, ms p50", added_ms, "at most", WAITING_LIMIT_MS),
        ]


class _Executor:
    """Executor without a device, with room for one plan behind the running one."""

    def __init__(self) -> None:
        self._launched: list[Plan] = []
        self._results: list[StepResult] = []
        self._token_ids = itertools.cycle(range(1, _VOCAB_SIZE))

    @property
    def has_capacity(self) -> bool:
        return len(self._launched) + len(self._results) <= 1

    def run_one(self) -> None:
        plan = self._launched.pop(0)
        self._results.append(StepResult(plan, [next(self._token_ids) for _ in plan.logit_rows], 0.0))

    def running_s(self) -> float:
        return 0.0

    def clear_wake(self) -> None:
        pass

    def launch(self, plan: Plan, _batch: StepBatch, _saves: object) -> None:
        self._launched.append(plan)

    def results(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results


class _Loop:
    """An engine whose turns are timed."""

    def __init__(self, num_running: int) -> None:
        pages_per_sequence = CONTEXT_TOKENS // _PAGE_SIZE_TOKENS
        self._link, self._executor, self._board = UnsentLink(), _Executor(), BackendBoard.create()
        self._scheduler = Scheduler(
            PagePool(num_running * pages_per_sequence), _PAGE_SIZE_TOKENS, num_running, max(512, num_running)
        )
        link, executor = cast("Any", self._link), cast("Any", self._executor)
        limits = EngineLimits(_VOCAB_SIZE, CONTEXT_TOKENS, max_waiting=1 << 20)
        self._engine = Engine(
            link,
            executor,
            self._scheduler,
            BatchBuilder(num_running, pages_per_sequence),
            Requests(link, self._scheduler, self._board, limits),
            self._board,
        )
        self._num_submitted = 0

    def submit(self, count: int) -> None:
        """Requests that go on for as long as they may, of one prompt's length and no common prefix."""
        for number in range(self._num_submitted, self._num_submitted + count):
            tokens = array("i", [number % _VOCAB_SIZE, number // _VOCAB_SIZE, *range(2, _PROMPT_TOKENS)]).tobytes()
            submit = Submit(number, tokens, _PROMPT_TOKENS, CONTEXT_TOKENS, Sampling(temperature=0.0))
            self._link.arrivals.append(Submission(number % NUM_FRONTENDS, submit, tokens))
        self._num_submitted += count

    def turn_ms(self) -> float:
        started_ns = time.thread_time_ns()
        self._engine.turn()
        elapsed_ms = (time.thread_time_ns() - started_ns) / 1e6
        self._executor.run_one()
        return elapsed_ms

    def settle(self, num_running: int) -> None:
        """Turns until so many run, and all of those decode."""
        while self._scheduler.num_running < num_running:
            self.turn_ms()
        for _ in range(_WARM_UP_TURNS):
            self.turn_ms()

    def measure(self, num_turns: int) -> TurnCost:
        times_ms = sorted(self.turn_ms() for _ in range(num_turns))
        return TurnCost(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            turns=num_turns,
            p50_ms=times_ms[num_turns // 2],
            p99_ms=times_ms[num_turns * 99 // 100],
            worst_ms=times_ms[-1],
        )

    def close(self) -> None:
        self._link.close()
        self._board.close()


def scheduling(*, rounds: RoundOptions = RoundOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run:
        with run.status("turns of the loop without a device"):
            costs = [measure_scheduling() for _ in range(rounds.rounds)]
        costs.sort(key=lambda cost: cost.alone.p50_ms)
        cost = costs[len(costs) // 2]
        run.add("scheduling", cost, scheduling_table(cost), cost.aims())
        run.console.print(
            f"Taking in {cost.crowded.waiting:,} requests that arrive at once: {cost.arrival_ms:.3f} ms of a turn for "
            "each."
        )
    return run.exit_status


def measure_scheduling(num_running: int = 256, num_waiting: int = 10_000, num_turns: int = 1000) -> SchedulingCost:
    """Twice num_turns and the warm-up must fit the context: at most 1,900 turns."""
    loop = _Loop(num_running)
    # As the backend does when it is ready.
    gc.collect()
    gc.freeze()
    try:
        loop.submit(num_running)
        loop.settle(num_running)
        alone = loop.measure(num_turns)
        loop.submit(num_waiting)
        arrival_ms = max(loop.turn_ms() for _ in range(_WARM_UP_TURNS)) / num_waiting
        return SchedulingCost(alone, loop.measure(num_turns), arrival_ms)
    finally:
        loop.close()
        gc.unfreeze()


def scheduling_table(cost: SchedulingCost) -> Table:
    table = make_table("A turn of the loop, without the device", "running", "waiting", "p50 ms", "p99 ms", "worst ms")
    for turn in (cost.alone, cost.crowded):
        times = (turn.p50_ms, turn.p99_ms, turn.worst_ms)
        table.add_row(str(turn.running), f"{turn.waiting:,}", *(f"{time_ms:.3f}" for time_ms in times))
    return table
