"""`penstock bench load`: throughput and latency of a server, as its clients see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import measure, warm_up
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

if TYPE_CHECKING:
    from penstock.tools.bench.load_generator.stats import LoadSummary
    from penstock.tools.bench.load_generator.target import ServerAddress, Target
    from penstock.tools.bench.load_generator.workload import Workload

_OPEN_LOOP_REQUESTS = 64
_REQUESTS_PER_CLIENT = 4


@MEASUREMENT
@dataclass(frozen=True)
class LoadOptions:
    concurrency: Counts = (1, 4, 16, 32)
    """Closed loop: concurrent clients; each sends its next request when its last has ended. The table gets
    one row for each count."""

    requests: AtLeastOne | None = None
    """Requests of a row. Default: 4 for each client; 64 in an open loop."""

    drop: Share = 0.0
    """Share of requests whose client hangs up at a random moment."""


def load(
    *,
    options: LoadOptions = LoadOptions(),
    traffic: TrafficOptions = TrafficOptions(),
    rounds: RowRounds = RowRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server_under_test(traffic.url, server) as address:
            uvloop.run(_measure_rows(run, address, options, traffic, rounds))
        if any(row.failed for row in run.report.rows):
            run.exit_status = 1
    return run.exit_status


async def _measure_rows(
    run: MeasurementRun, address: ServerAddress, options: LoadOptions, traffic: TrafficOptions, rounds: RowRounds
) -> None:
    async with address.connect(traffic.endpoint) as target:
        workload = traffic.traffic(target, drop=options.drop)
        if workload.rate_per_s is not None:
            await measure_row(run, target, workload, options.requests or _OPEN_LOOP_REQUESTS, 1, rounds)
            return
        for concurrency in options.concurrency:
            num_requests = options.requests or _REQUESTS_PER_CLIENT * concurrency
            await measure_row(run, target, workload, num_requests, concurrency, rounds)


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
