"""`penstock bench shared-prefix`: requests with one long prefix arrive together. How often is the prefix computed?

Distinct tokens are the prefix once and the suffix of each request: the least that can be computed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvloop

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.counters import Counters, backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import run_all, warm_up
from penstock.tools.bench.load_generator.stats import Aim, duration_s, percentile, ttfts_s
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    OutputLength,
    ReportOptions,
    WarmRounds,
)

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.target import Target


@MEASUREMENT
@dataclass(frozen=True)
class SharedPrefixOptions:
    requests: AtLeastOne = 64
    """Requests that arrive together."""

    prefix_tokens: AtLeastOne = 1000
    """Tokens that all prompts have in common."""

    suffix_tokens: AtLeastOne = 32
    """Tokens of its own that each prompt has after the prefix."""


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """num_requests prompts with one prefix, each with a suffix of its own."""

    num_requests: int
    prefix_tokens: int
    suffix_tokens: int

    @property
    def prompt_tokens(self) -> Lengths:
        """The length of every prompt."""
        length = self.prefix_tokens + self.suffix_tokens
        return Lengths(length, length)

    @property
    def distinct_tokens(self) -> int:
        return self.prefix_tokens + self.num_requests * self.suffix_tokens

    @property
    def sent_tokens(self) -> int:
        return self.num_requests * (self.prefix_tokens + self.suffix_tokens)

    def draw(self, workload: Workload, seed: int) -> list[PlannedRequest]:
        """All are due at once. Prompts of different seeds have nothing in common. Raises BenchError."""
        drawn = replace(workload, prompt_tokens=self.prompt_tokens).draw(self.num_requests, seed)
        prompts = [request.prompt for request in drawn if not isinstance(request.prompt, str)]
        if len(prompts) != len(drawn):
            raise BenchError("a shared prefix needs prompts of token ids; this server offers none")
        prefix = prompts[0][: self.prefix_tokens]
        return [
            replace(request, prompt=prefix + prompt[self.prefix_tokens :])
            for request, prompt in zip(drawn, prompts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PrefixRound:
    prefill_tokens: int
    """Prompt tokens computed."""
    cached_tokens: int
    """Prompt tokens that requests took from pages of others, as the server counts them."""
    wall_s: float
    ttft_p50_s: float
    ttft_p99_s: float


@dataclass(frozen=True, slots=True)
class SharedPrefixResult:
    load: PrefixLoad
    distinct_tokens: int
    rounds: list[PrefixRound]

    @property
    def prefill_tokens(self) -> float:
        return statistics.median(entry.prefill_tokens for entry in self.rounds)

    def aims(self) -> list[Aim]:
        return [
            Aim("prompt tokens, computed / distinct", self.prefill_tokens / self.distinct_tokens, "at most", 1.05),
        ]


def shared_prefix(
    *,
    options: SharedPrefixOptions = SharedPrefixOptions(),
    output: OutputLength = OutputLength(),
    rounds: WarmRounds = WarmRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    load = PrefixLoad(options.requests, options.prefix_tokens, options.suffix_tokens)
    with measurement_run(report.json) as run:
        with run.server(server) as own:
            found = uvloop.run(_measure(run, own, load, output, rounds))
        run.add("shared_prefix", found, shared_prefix_table(found), found.aims())
    return run.exit_status


async def _measure(
    run: MeasurementRun, server: BenchServer, load: PrefixLoad, output: OutputLength, rounds: WarmRounds
) -> SharedPrefixResult:
    found = SharedPrefixResult(load, load.distinct_tokens, [])
    async with server.address.connect() as target, backend_counters(server) as counters:
        workload = Workload(load.prompt_tokens, output.output_tokens, target.vocab_size)
        await warm_up(target, workload, rounds.warmup, load.num_requests, rounds.seed)
        for index in range(rounds.rounds):
            with run.status(f"{load.num_requests} requests with one prefix, round {index + 1}"):
                requests = load.draw(workload, rounds.seed + index)
                found.rounds.append(await measure_round(target, requests, counters))
    return found


async def measure_round(target: Target, requests: list[PlannedRequest], counters: Counters) -> PrefixRound:
    """Raises BenchError if a request fails."""
    before = counters.read()
    records = await run_all(target, requests)
    did = counters.since(before)
    # Every output token but the last of each answer is computed too, to get the next one.
    decoded_tokens = did["generated_tokens"] - len(requests)
    return PrefixRound(
        prefill_tokens=did["computed_tokens"] - decoded_tokens,
        cached_tokens=did["cached_tokens"],
        wall_s=duration_s(records),
        ttft_p50_s=percentile(ttfts_s(records), 50) or 0.0,
        ttft_p99_s=percentile(ttfts_s(records), 99) or 0.0,
    )


def shared_prefix_table(found: SharedPrefixResult) -> Table:
    load = found.load
    title = (
        f"{load.num_requests} requests at once: {load.prefix_tokens:,} tokens in common, {load.suffix_tokens} of each "
        "one's own"
    )
    table = make_table(title, "prompt tokens", "", "by distinct", "wall ms", "TTFT ms p50 / p99")
    table.add_row("sent", f"{load.sent_tokens:,}", f"{load.sent_tokens / found.distinct_tokens:.2f} ×")
    rounds = found.rounds
    wall_s, p50_s, p99_s = (
        statistics.median(getattr(entry, field) for entry in rounds) for field in ("wall_s", "ttft_p50_s", "ttft_p99_s")
    )
    table.add_row(
        f"computed, median of {len(rounds)} rounds",
        f"{found.prefill_tokens:,.0f}",
        f"{found.prefill_tokens / found.distinct_tokens:.3f} ×",
        f"{1000 * wall_s:.0f}",
        f"{1000 * p50_s:.0f} / {1000 * p99_s:.0f}",
    )
    table.add_row("distinct", f"{found.distinct_tokens:,}", "1 ×")
    return table
