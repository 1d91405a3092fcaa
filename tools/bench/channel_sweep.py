"""The same load for each capacity of the batch channel: why one plan ahead is enough, and none too few.

Each capacity has a server of its own in each round, and rounds take turns. Three loads:

* steady: a closed loop of the last --concurrency, for throughput and time to first token;
* drops: the same, but a share of the clients hangs up at random moments; tokens that were computed for nobody count;
* spike: the steady load again, and in the midst of it three bursts of 16 requests of one token each.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvloop

from tools.bench.counters import Counters, backend_counters
from tools.bench.load import BenchError, Target, measure, run_all, run_closed_loop, warm_up
from tools.bench.report import make_table
from tools.bench.stats import Summary, percentile, ttfts_s
from tools.bench.storm import settle
from tools.bench.workload import Lengths, PlannedRequest, Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tools.bench.context import Bench
    from tools.bench.server import OwnServer

CAPACITIES = (0, 1, 2, 4)
SPIKE_REQUESTS = 16
_SPIKES = 3


@dataclass(frozen=True, slots=True)
class Drops:
    computed_tokens: int
    wasted_tokens: int
    """Computed in rows whose sequence had ended when the step's result was there."""
    cancel_to_free_ms: float
    """From a frontend's noticing that a client has gone to its pages' being free; the mean."""


@dataclass(frozen=True, slots=True)
class Spike:
    """Time to first token of the bursts' requests: of each burst's first, and of all."""

    first_ms: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class CapacityRound:
    steady: Summary
    drops: Drops
    spike: Spike


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One capacity's medians over the rounds."""

    capacity: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    wasted_tokens: float
    wasted_share: float
    """Of the tokens computed under drops."""
    cancel_to_free_ms: float
    spike_first_ms: float
    spike_p50_ms: float
    spike_p99_ms: float

    @classmethod
    def of(cls, capacity: int, rounds: Sequence[CapacityRound]) -> CapacityRow:
        def median(value: Callable[[CapacityRound], float | None]) -> float:
            return statistics.median(value(entry) or 0.0 for entry in rounds)

        return cls(
            capacity=capacity,
            output_tokens_per_s=median(lambda entry: entry.steady.output_tokens_per_s),
            ttft_p50_ms=median(lambda entry: entry.steady.ttft_ms.p50),
            ttft_p99_ms=median(lambda entry: entry.steady.ttft_ms.p99),
            itl_p50_ms=median(lambda entry: entry.steady.itl_ms.p50),
            wasted_tokens=median(lambda entry: entry.drops.wasted_tokens),
            wasted_share=median(lambda entry: entry.drops.wasted_tokens / max(entry.drops.computed_tokens, 1)),
            cancel_to_free_ms=median(lambda entry: entry.drops.cancel_to_free_ms),
            spike_first_ms=median(lambda entry: entry.spike.first_ms),
            spike_p50_ms=median(lambda entry: entry.spike.p50_ms),
            spike_p99_ms=median(lambda entry: entry.spike.p99_ms),
        )


@dataclass(frozen=True, slots=True)
class ChannelSweep:
    concurrency: int
    rows: list[CapacityRow]
    rounds: dict[int, list[CapacityRound]]
    """By capacity."""


def run_channel_sweep(bench: Bench, console: Console) -> bool:
    rounds: dict[int, list[CapacityRound]] = {capacity: [] for capacity in CAPACITIES}
    for index in range(bench.num_rounds):
        for capacity in CAPACITIES:
            with (
                bench.own_server(replace(bench.server, batch_channel_capacity=capacity)) as own,
                bench.progress.status(f"capacity {capacity}, round {index + 1} of {bench.num_rounds}"),
            ):
                rounds[capacity].append(uvloop.run(_measure_capacity(bench, own, index)))
    rows = [CapacityRow.of(capacity, rounds[capacity]) for capacity in CAPACITIES]
    sweep = ChannelSweep(bench.options.concurrency[-1], rows, rounds)
    bench.report.sections["channel_sweep"] = sweep
    console.print(sweep_table(sweep))
    for line in against_default(sweep.rows):
        console.print(line, highlight=False)
    return True


async def _measure_capacity(bench: Bench, own: OwnServer, index: int) -> CapacityRound:
    """Each capacity is sent the same requests in the same round. Raises BenchError where one fails."""
    options = bench.options
    concurrency = options.concurrency[-1]
    num_requests = options.requests or 4 * concurrency
    seed = options.seed + 10_000 * index
    async with bench.target(own.url) as target, backend_counters(own) as counters:
        workload = bench.plain_workload(target)
        await warm_up(target, workload, max(options.warmup, concurrency), concurrency, seed)
        steady = await measure(target, workload, num_requests, concurrency, seed)
        if steady.failed:
            raise BenchError(f"a request of the steady load failed: {steady.first_error}")
        dropping = replace(workload, drop=bench.drop_or(0.5))
        drops = await measure_drops(target, dropping, counters, num_requests, concurrency, seed + 1)
        spike = await measure_spikes(target, workload, num_requests, concurrency, steady.duration_s, seed + 2)
    return CapacityRound(steady, drops, spike)


async def measure_drops(
    target: Target, workload: Workload, counters: Counters, num_requests: int, concurrency: int, seed: int
) -> Drops:
    before = counters.read()
    summary = await measure(target, workload, num_requests, concurrency, seed)
    if summary.failed:
        raise BenchError(f"a request of the load with drops failed: {summary.first_error}")
    await settle(target)
    # Steps run in order: when a last request is answered, the results of all before it have been counted.
    last = replace(workload, drop=0.0, prompt_tokens=Lengths(1, 1), output_tokens=Lengths(1, 1))
    await run_all(target, last.draw(1, seed))
    did = counters.since(before)
    return Drops(
        computed_tokens=did["computed_tokens"],
        wasted_tokens=did["wasted_tokens"],
        cancel_to_free_ms=did["cancel_to_free_sum_us"] / 1000 / max(did["cancel_to_free_count"], 1),
    )


async def measure_spikes(
    target: Target, workload: Workload, num_requests: int, concurrency: int, duration_s: float, seed: int
) -> Spike:
    """Bursts that arrive evenly within the steady load's duration_s. Raises BenchError where a request fails."""
    steady = asyncio.create_task(run_closed_loop(target, workload.draw(num_requests, seed), concurrency))
    started_s = time.perf_counter()
    bursts = []
    try:
        for number in range(1, _SPIKES + 1):
            await asyncio.sleep(started_s + duration_s * number / (_SPIKES + 1) - time.perf_counter())
            bursts.append(await run_all(target, _burst(workload, seed + 100 * number)))
    finally:
        records = await steady
    if error := next((record.error for record in records if record.error), ""):
        raise BenchError(f"a request of the steady load failed: {error}")
    all_s = [ttft_s for burst in bursts for ttft_s in ttfts_s(burst)]
    return Spike(
        first_ms=1000 * statistics.median(min(ttfts_s(burst)) for burst in bursts),
        p50_ms=1000 * (percentile(all_s, 50) or 0.0),
        p99_ms=1000 * (percentile(all_s, 99) or 0.0),
    )


def _burst(workload: Workload, seed: int) -> list[PlannedRequest]:
    """Of one token each: what is asked is when it comes."""
    return replace(workload, output_tokens=Lengths(1, 1)).draw(SPIKE_REQUESTS, seed)


def sweep_table(sweep: ChannelSweep) -> Table:
    num_rounds = len(sweep.rounds[sweep.rows[0].capacity])
    title = f"Plans prepared ahead, {sweep.concurrency} clients: medians of {num_rounds} rounds"
    columns = ["batch channel\ncapacity", "output\ntok/s", "TTFT ms\np50 / p99", "ITL ms\np50"]
    columns += ["under drops: tokens\nwasted / of computed", "cancel to\nfree, ms"]
    table = make_table(title, *columns, f"TTFT ms of a burst of {SPIKE_REQUESTS}\nfirst / p50 / p99")
    for row in sweep.rows:
        table.add_row(
            str(row.capacity),
            f"{row.output_tokens_per_s:,.0f}",
            f"{row.ttft_p50_ms:.0f} / {row.ttft_p99_ms:.0f}",
            f"{row.itl_p50_ms:.2f}",
            f"{row.wasted_tokens:,.0f} / {row.wasted_share:.2%}",
            f"{row.cancel_to_free_ms:.2f}",
            f"{row.spike_first_ms:.0f} / {row.spike_p50_ms:.0f} / {row.spike_p99_ms:.0f}",
        )
    return table


def against_default(rows: Sequence[CapacityRow]) -> list[str]:
    """What each other capacity gives beside capacity 1."""
    by_capacity = {row.capacity: row for row in rows}
    one = by_capacity.pop(1)
    return [
        f"Capacity {capacity} against 1: {row.output_tokens_per_s / one.output_tokens_per_s:.2f} × the throughput, "
        f"{row.spike_first_ms / one.spike_first_ms:.2f} × the wait for a burst's first token."
        for capacity, row in by_capacity.items()
    ]
