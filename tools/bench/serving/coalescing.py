"""`penstock bench coalescing`: the cost of eight identical greedy requests, which share one computation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from penstock.tools.bench.harness.counters import Counters, backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import run_all
from penstock.tools.bench.load_generator.stats import Aim, duration_s
from penstock.tools.bench.options import BenchServerOptions, ReportOptions, RequestLengths, SeededRounds

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.target import Target
    from penstock.tools.bench.load_generator.workload import PlannedRequest, Workload

NUM_STREAMS = 8
_REPEATS_PER_ROUND = 5
"""One repeat takes as long as one answer, so a round can afford a few."""


@dataclass(frozen=True, slots=True)
class CoalescingSide:
    """Time and tokens from the first request to the end of the last answer."""

    wall_s: float
    output_tokens: int
    """Tokens that reached the clients."""
    generated_tokens: int
    computed_tokens: int
    """Prompt tokens and generated ones, in all steps."""
    requests_coalesced: int


@dataclass(frozen=True, slots=True)
class CoalescingResult:
    """Each round draws one prompt for the single stream and another for the eight."""

    streams: int
    alone: list[CoalescingSide]
    identical: list[CoalescingSide]

    @property
    def wall_ratio(self) -> float:
        """The median of the ratios of the rounds."""
        return statistics.median(
            identical.wall_s / alone.wall_s for alone, identical in zip(self.alone, self.identical, strict=True)
        )

    @property
    def computed_ratio(self) -> float:
        return sum(side.computed_tokens for side in self.identical) / sum(side.computed_tokens for side in self.alone)

    def aims(self) -> list[Aim]:
        name = f"{self.streams} identical greedy streams / one alone"
        return [
            Aim(f"wall time, {name}", self.wall_ratio, "at most", 1.05),
            Aim(f"tokens computed, {name}", self.computed_ratio, "at most", 1.05),
        ]


def coalescing(
    *,
    lengths: RequestLengths = RequestLengths(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server(server) as own:
            found = uvloop.run(_measure(run, own, lengths, rounds))
        run.add("coalescing", found, coalescing_table(found), found.aims())
    return run.exit_status


async def _measure(
    run: MeasurementRun, server: BenchServer, lengths: RequestLengths, rounds: SeededRounds
) -> CoalescingResult:
    async with server.address.connect() as target, backend_counters(server) as counters:
        with run.status(f"one stream and {NUM_STREAMS} identical ones take turns"):
            return await measure_coalescing(
                target,
                lengths.workload(target),
                counters,
                num_repeats=_REPEATS_PER_ROUND * rounds.rounds,
                seed=rounds.seed,
            )


async def measure_coalescing(
    target: Target, workload: Workload, counters: Counters, *, num_repeats: int, seed: int
) -> CoalescingResult:
    """One stream and the eight alternate in going first. Raises BenchError if a request fails."""
    found = CoalescingResult(NUM_STREAMS, [], [])
    for index in range(-2, num_repeats):  # the first two warm up
        one, other = workload.draw(2, seed + index + 2)
        turns = [([one], found.alone), ([other] * NUM_STREAMS, found.identical)]
        for requests, sides in turns if index % 2 == 0 else reversed(turns):
            side = await _measure_side(target, requests, counters)
            if index >= 0:
                sides.append(side)
    return found


async def _measure_side(target: Target, requests: Sequence[PlannedRequest], counters: Counters) -> CoalescingSide:
    before = counters.read()
    records = await run_all(target, requests)
    did = counters.since(before)
    return CoalescingSide(
        wall_s=duration_s(records),
        output_tokens=sum(record.output_tokens for record in records),
        generated_tokens=did["generated_tokens"],
        computed_tokens=did["computed_tokens"],
        requests_coalesced=did["requests_coalesced"],
    )


def coalescing_table(found: CoalescingResult) -> Table:
    rounds = len(found.alone)
    columns = ("streams", "wall ms", "tokens streamed", "generated", "computed", "coalesced")
    table = make_table(f"Identical greedy streams: medians of {rounds} rounds", *columns)
    for name, sides in ((f"{found.streams} identical", found.identical), ("1 alone", found.alone)):
        counts = [
            statistics.median(getattr(side, field) for side in sides)
            for field in ("output_tokens", "generated_tokens", "computed_tokens", "requests_coalesced")
        ]
        wall_ms = 1000 * statistics.median(side.wall_s for side in sides)
        table.add_row(name, f"{wall_ms:.1f}", *(f"{count:,.0f}" for count in counts))
    return table
