"""`penstock bench storm`: many clients hang up at random moments; then the server must hold no page or request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    ClientCount,
    ReportOptions,
    RowRounds,
    Share,
    TrafficOptions,
)
from penstock.tools.bench.serving.load import measure_row

if TYPE_CHECKING:
    from penstock.tools.bench.load_generator.target import ReadyState, ServerAddress, Target

_SETTLE_TIMEOUT_S = 10.0


@MEASUREMENT
@dataclass(frozen=True)
class StormOptions:
    concurrency: ClientCount = 32
    """Concurrent clients; each sends its next request when its last has ended."""

    requests: AtLeastOne = 500
    """Requests of a round."""

    drop: Share = 0.5
    """Share of requests whose client hangs up at a random moment."""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Requests and pages that the server held after the last client had left."""

    running: int
    waiting: int
    pages_used: int
    clean_after_s: float | None
    """None if it still held something when the time was up."""


def storm(
    *,
    options: StormOptions = StormOptions(),
    traffic: TrafficOptions = TrafficOptions(),
    rounds: RowRounds = RowRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server_under_test(traffic.url, server) as address:
            aftermath = uvloop.run(_measure_storm(run, address, options, traffic, rounds))
        run.report.sections["aftermath"] = aftermath
        is_clean = aftermath.clean_after_s is not None
        run.console.print(_describe(aftermath), style="green" if is_clean else "red")
        if not is_clean or any(row.failed for row in run.report.rows):
            run.exit_status = 1
    return run.exit_status


async def _measure_storm(
    run: MeasurementRun, address: ServerAddress, options: StormOptions, traffic: TrafficOptions, rounds: RowRounds
) -> Aftermath:
    async with address.connect(traffic.endpoint) as target:
        workload = traffic.traffic(target, drop=options.drop)
        await measure_row(run, target, workload, options.requests, options.concurrency, rounds)
        return await settle(target)


async def settle(target: Target) -> Aftermath:
    """Wait until nothing runs or waits and every page is free, for at most 10 s. Raises BenchError."""
    started_s = time.monotonic()
    while True:
        state = await target.ready_state()
        elapsed_s = time.monotonic() - started_s
        held = _held(state)
        if held == (0, 0, 0) or elapsed_s > _SETTLE_TIMEOUT_S:
            return Aftermath(*held, clean_after_s=elapsed_s if held == (0, 0, 0) else None)
        await asyncio.sleep(0.02)


def _held(state: ReadyState) -> tuple[int, int, int]:
    if state.running is None or state.waiting is None or state.pages_used is None:
        raise BenchError("/ready has no running, waiting and pages_used: this is not a Penstock server")
    return state.running, state.waiting, state.pages_used


def _describe(aftermath: Aftermath) -> str:
    if aftermath.clean_after_s is None:
        when = f"not clean after {_SETTLE_TIMEOUT_S:g} s"
    else:
        when = f"after {1000 * aftermath.clean_after_s:.0f} ms"
    return (
        f"Afterwards {aftermath.running} running, {aftermath.waiting} waiting, {aftermath.pages_used} pages in use: "
        f"{when}."
    )
