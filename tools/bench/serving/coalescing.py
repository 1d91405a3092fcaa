"""Identical greedy requests share one computation: what eight of them cost beside one alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from penstock.tools.bench.harness.counters import Counters, backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.load_generator.sending import Target, run_all
from penstock.tools.bench.load_generator.stats import Aim, duration_s
from penstock.tools.bench.load_generator.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.tools.bench.harness.run import Bench
    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.workload import PlannedRequest

NUM_STREAMS = 8
_ROUNDS_PER_ROUND = 5
"""One round takes as long as one answer, so that it can afford a few."""


@dataclass(frozen=True, slots=True)
class CoalescingSide:
    """From the first request to the last answer's end, and what the backend did meanwhile."""

    wall_s: float
    output_tokens: int
    """That reached the clients."""
    generated_tokens: int
    computed_tokens: int
    """Prompt tokens and generated ones, in all steps."""
    requests_coalesced: int


@dataclass(frozen=True, slots=True)
class CoalescingResult:
    """Each round has one prompt for the one stream and another for the eight."""

    streams: int
    alone: list[CoalescingSide]
    identical: list[CoalescingSide]

    @property
    def wall_ratio(self) -> float:
        """The median of the rounds' ratios."""
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


def run_coalescing(bench: Bench, console: Console) -> bool:
    with bench.bench_server() as own:
        found = uvloop.run(_on(bench, own))
    bench.report.sections["coalescing"] = found
    bench.report.aims += found.aims()
    console.print(coalescing_table(found))
    return True


async def _on(bench: Bench, own: BenchServer) -> CoalescingResult:
    async with bench.target(own.url) as target, backend_counters(own) as counters:
        with bench.progress.status("one stream and eight identical ones, in turns"):
            return await measure_coalescing(
                target,
                bench.plain_workload(target),
                counters,
                num_rounds=_ROUNDS_PER_ROUND * bench.num_rounds,
                seed=bench.options.seed,
            )


async def measure_coalescing(
    target: Target, workload: Workload, counters: Counters, *, num_rounds: int, seed: int
) -> CoalescingResult:
    """Who goes first alternates. Raises BenchError where a request fails."""
    found = CoalescingResult(NUM_STREAMS, [], [])
    for index in range(-2, num_rounds):  # the first two are for warming up
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
