"""The shapes of `penstock bench load` whose requests come at once and share work: is it computed once?

A burst takes turns with a single request of the same size. Each round draws new prompts, so no cache answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.counters import Counters, backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.load_generator.sending import run_all
from penstock.tools.bench.load_generator.stats import Aim, duration_s, percentile, ttfts_s
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.run import MeasurementRun
    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.target import Target
    from penstock.tools.bench.options import SeededRounds, TrafficOptions

_REPEATS_PER_ROUND = 5
"""One repeat takes as long as one answer, so a round can afford a few."""
_LIMIT = 1.05


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that come at once. Without a prefix all are the same."""

    workload: Workload
    prefix_tokens: int = 0
    """Tokens that all prompts begin with, before those of the workload."""

    def draw(self, streams: int, seed: int) -> list[PlannedRequest]:
        """Prompts of different seeds have nothing in common. Raises BenchError."""
        own, prefix_tokens = self.workload.prompt_tokens, self.prefix_tokens
        lengths = Lengths(prefix_tokens + own.low, prefix_tokens + own.high)
        drawn = replace(self.workload, prompt_tokens=lengths).draw(streams if prefix_tokens else 1, seed)
        prompts = [request.prompt for request in drawn if not isinstance(request.prompt, str)]
        if len(prompts) != len(drawn):
            raise BenchError("requests that share work need prompts of token ids, which these are not")
        prefix = prompts[0][:prefix_tokens]
        requests = [
            replace(request, prompt=prefix + prompt[prefix_tokens:])
            for request, prompt in zip(drawn, prompts, strict=True)
        ]
        return requests if prefix_tokens else requests * streams

    def distinct_tokens(self, requests: Sequence[PlannedRequest]) -> int:
        """The fewest prompt tokens that can be computed."""
        prompts = {request.prompt for request in requests}
        return self.prefix_tokens + sum(len(prompt) - self.prefix_tokens for prompt in prompts)


@dataclass(frozen=True, slots=True)
class BurstSide:
    """Time and tokens from the first request to the end of the last answer."""

    wall_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    output_tokens: int
    """Tokens that reached the clients."""
    generated_tokens: int
    computed_tokens: int
    """Prompt tokens and generated ones, in all steps."""
    prefill_tokens: int
    """Prompt tokens computed."""
    distinct_tokens: int
    cached_tokens: int
    """Prompt tokens that requests took from pages of others, as the server counts them."""
    requests_coalesced: int


@dataclass(frozen=True, slots=True)
class BurstResult:
    """The same number of both sides."""

    shape: str
    streams: int
    alone: list[BurstSide]
    burst: list[BurstSide]

    @property
    def wall_ratio(self) -> float:
        """The median of the ratios of the rounds."""
        return statistics.median(many.wall_s / one.wall_s for many, one in zip(self.burst, self.alone, strict=True))

    @property
    def computed_ratio(self) -> float:
        return sum(side.computed_tokens for side in self.burst) / sum(side.computed_tokens for side in self.alone)

    @property
    def prefill_ratio(self) -> float:
        return statistics.median(side.prefill_tokens / side.distinct_tokens for side in self.burst)

    def aims(self) -> list[Aim]:
        if self.shape != "identical":
            name = f"prompt tokens of {self.streams} requests, computed / distinct"
            return [Aim(name, self.prefill_ratio, "at most", _LIMIT)]
        name = f"{self.streams} identical greedy streams / one alone"
        return [
            Aim(f"wall time, {name}", self.wall_ratio, "at most", _LIMIT),
            Aim(f"tokens computed, {name}", self.computed_ratio, "at most", _LIMIT),
        ]


async def measure_bursts(
    run: MeasurementRun,
    server: BenchServer,
    shape: str,
    traffic: TrafficOptions,
    prefix_tokens: int,
    counts: Sequence[int],
    rounds: SeededRounds,
) -> None:
    """Add a result for each number of streams. Raises BenchError if a request fails."""
    found: list[BurstResult] = []
    async with (
        server.address.connect(traffic.endpoint, traffic.sampling()) as target,
        backend_counters(server) as counters,
    ):
        burst = Burst(traffic.prompts(target), prefix_tokens)
        for place, streams in enumerate(counts):
            result = BurstResult(shape, streams, [], [])
            for index in range(-2, _REPEATS_PER_ROUND * rounds.rounds):  # the first two warm up
                with run.status(f"{streams} {shape} requests at once, repeat {index + 1}"):
                    seed = rounds.seed + 1_000_003 * place + 2 * index + 4
                    turns = [(burst.draw(1, seed), result.alone), (burst.draw(streams, seed + 1), result.burst)]
                    for requests, sides in turns if index % 2 == 0 else reversed(turns):
                        side = await _measure_side(target, burst, requests, counters)
                        if index >= 0:
                            sides.append(side)
            found.append(result)
    aims = [aim for each in found for aim in each.aims()]
    run.add(shape.replace("-", "_"), found, bursts_table(shape, found), aims)


async def _measure_side(
    target: Target, burst: Burst, requests: Sequence[PlannedRequest], counters: Counters
) -> BurstSide:
    before = counters.read()
    records = await run_all(target, requests)
    did = counters.since(before)
    num_computed = len(requests) - did["requests_coalesced"]
    return BurstSide(
        wall_s=duration_s(records),
        ttft_p50_s=percentile(ttfts_s(records), 50) or 0.0,
        ttft_p99_s=percentile(ttfts_s(records), 99) or 0.0,
        output_tokens=sum(record.output_tokens for record in records),
        generated_tokens=did["generated_tokens"],
        computed_tokens=did["computed_tokens"],
        # Every generated token but the last of each answer is computed too, to get the next one.
        prefill_tokens=did["computed_tokens"] - (did["generated_tokens"] - num_computed),
        distinct_tokens=burst.distinct_tokens(requests),
        cached_tokens=did["cached_tokens"],
        requests_coalesced=did["requests_coalesced"],
    )


def bursts_table(shape: str, results: Sequence[BurstResult]) -> Table:
    columns = ["requests", "wall ms", "TTFT ms\np50 / p99", "tokens\nstreamed", "gener-\nated", "com-\nputed"]
    columns += ["prefill", "dis-\ntinct", "cached", "coa-\nlesced", "wall, by\none alone", "prefill, by\ndistinct"]
    table = make_table(f"{shape} requests at once: medians of {len(results[0].burst)} repeats", *columns)
    for found in results:
        ratios = ("", ""), (f"{found.wall_ratio:.3f} ×", f"{found.prefill_ratio:.3f} ×")
        names = "1 alone", f"{found.streams} {shape}"
        for name, sides, shown in zip(names, (found.alone, found.burst), ratios, strict=True):
            wall_s, p50_s, p99_s, *counts = (
                statistics.median(getattr(side, field) for side in sides) for field in BurstSide.__slots__
            )
            times = f"{1000 * wall_s:.1f}", f"{1000 * p50_s:.0f} / {1000 * p99_s:.0f}"
            table.add_row(name, *times, *(f"{count:,.0f}" for count in counts), *shown)
    return table
