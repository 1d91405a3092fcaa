"""`penstock bench load`: throughput and latency of a server, as its clients see them.

`--shape` says how requests come:

* plain: clients that send one request after the other;
* storm: the same, but clients hang up at random moments; then the server must hold no page or request;
* identical, shared-prefix: all at once, with one prompt or one prefix (`bursts`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

import uvloop

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import measure, warm_up
from penstock.tools.bench.load_generator.stats import LoadSummary
from penstock.tools.bench.load_generator.target import ReadyState, ServerAddress, Target
from penstock.tools.bench.load_generator.workload import Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    Counts,
    ReportOptions,
    RowRounds,
    Share,
    TrafficOptions,
)
from penstock.tools.bench.serving.bursts import measure_bursts

_OPEN_LOOP_REQUESTS = 64
_REQUESTS_PER_CLIENT = {"plain": 4, "storm": 16}
_STORM_DROP = 0.5
_SETTLE_TIMEOUT_S = 10.0


@MEASUREMENT
@dataclass(frozen=True)
class LoadOptions:
    shape: Literal["plain", "storm", "identical", "shared-prefix"] = "plain"
    """How requests come. storm: clients hang up, and must leave nothing behind. identical: all clients send one greedy
    request at once, which should cost as much as one alone. shared-prefix: they send prompts with one prefix."""

    concurrency: Counts = (1, 4, 16, 32)
    """Closed loop: concurrent clients; each sends its next request when its last has ended. The table gets
    one row for each count."""

    requests: AtLeastOne | None = None
    """Requests of a row. Default: 4 for each client, 16 in a storm; 64 in an open loop."""

    drop: Share | None = None
    """Share of requests whose client hangs up at a random moment. Default: 0, and 0.5 in a storm."""

    prefix_tokens: AtLeastOne = 1000
    """Tokens that all prompts of the shape shared-prefix begin with, before --prompt-tokens of their own."""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Requests and pages that the server held after the last client had left."""

    running: int
    waiting: int
    pages_used: int
    clean_after_s: float | None
    """None if it still held something when the time was up."""


def load(
    *,
    options: LoadOptions = LoadOptions(),
    traffic: TrafficOptions = TrafficOptions(),
    rounds: RowRounds = RowRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        if options.shape in ("identical", "shared-prefix"):
            if traffic.url is not None:
                raise BenchError(f"--shape {options.shape} reads counters of a server that it starts: leave --url out")
            prefix_tokens = options.prefix_tokens if options.shape == "shared-prefix" else 0
            counts = options.concurrency
            with run.server(server) as own:
                uvloop.run(measure_bursts(run, own, options.shape, traffic, prefix_tokens, counts, rounds))
        else:
            with run.server_under_test(traffic.url, server) as address:
                uvloop.run(_measure_rows(run, address, options, traffic, rounds))
        if any(row.failed for row in run.report.rows):
            run.exit_status = 1
    return run.exit_status


async def _measure_rows(
    run: MeasurementRun, address: ServerAddress, options: LoadOptions, traffic: TrafficOptions, rounds: RowRounds
) -> None:
    is_storm = options.shape == "storm"
    drop = options.drop if options.drop is not None else _STORM_DROP if is_storm else 0.0
    async with address.connect(traffic.endpoint, traffic.sampling()) as target:
        workload = traffic.traffic(target, drop=drop)
        is_open = workload.rate_per_s is not None
        for concurrency in (1,) if is_open else options.concurrency:
            default = _OPEN_LOOP_REQUESTS if is_open else _REQUESTS_PER_CLIENT[options.shape] * concurrency
            await measure_row(run, target, workload, options.requests or default, concurrency, rounds)
        if is_storm:
            _report_aftermath(run, await settle(target))


async def measure_row(
    run: MeasurementRun, target: Target, workload: Workload, num_requests: int, concurrency: int, rounds: RowRounds
) -> LoadSummary:
    """Add the round with the median throughput to the report. Each round draws new prompts, so none is cached.

    Raises BenchError.
    """
    seed = rounds.seed + 1_000_003 * len(run.report.rows)
    await warm_up(target, workload, rounds.warmup, concurrency, seed)
    summaries = []
    for index in range(rounds.rounds):
        clients = f"{concurrency} clients" if workload.rate_per_s is None else f"{workload.rate_per_s:g} requests/s"
        with run.status(f"{clients}, round {index + 1} of {rounds.rounds}"):
            summaries.append(await measure(target, workload, num_requests, concurrency, seed + index))
    summaries.sort(key=lambda summary: summary.output_tokens_per_s)
    median = summaries[len(summaries) // 2]
    run.report.rows.append(median)
    return median


async def settle(target: Target) -> Aftermath:
    """Wait until nothing runs or waits and every page is free, for at most 10 s. Raises BenchError."""
    started_s = time.monotonic()
    while True:
        held = _held(await target.ready_state())
        elapsed_s = time.monotonic() - started_s
        if held == (0, 0, 0) or elapsed_s > _SETTLE_TIMEOUT_S:
            return Aftermath(*held, clean_after_s=elapsed_s if held == (0, 0, 0) else None)
        await asyncio.sleep(0.02)


def _held(state: ReadyState) -> tuple[int, int, int]:
    if state.running is None or state.waiting is None or state.pages_used is None:
        raise BenchError("/ready has no running, waiting and pages_used: this is not a Penstock server")
    return state.running, state.waiting, state.pages_used


def _report_aftermath(run: MeasurementRun, found: Aftermath) -> None:
    run.report.sections["aftermath"] = found
    is_clean = found.clean_after_s is not None
    when = f"not clean after {_SETTLE_TIMEOUT_S:g} s"
    if found.clean_after_s is not None:
        when = f"after {1000 * found.clean_after_s:.0f} ms"
    held = f"{found.running} running, {found.waiting} waiting, {found.pages_used} pages in use"
    run.console.print(f"Afterwards {held}: {when}.", style="green" if is_clean else "red")
    if not is_clean:
        run.exit_status = 1
