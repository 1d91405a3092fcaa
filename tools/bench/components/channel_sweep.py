"""`penstock bench channel-sweep`: the same load for each capacity of the batch channel and for early and late plans.

The backend's loop is the real one; device, clients and clock are simulated (`simulation`). Each round gives every
variant the same three loads, and the variants take turns:

* steady: a closed loop, for throughput and for the time that the device waits between steps;
* drops: the same, but a share of the clients hangs up at random moments; tokens that nobody receives count as wasted;
* spike: the steady load again, and within it ten bursts of 16 requests of one token each.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.backend.engine.step_timing import StepTiming
from penstock.backend.options import BackendOptions, SmallCount
from penstock.tools.bench.components.simulated_device import STEP_S, VOCAB_SIZE
from penstock.tools.bench.components.simulation import Burst, Simulation, SimulationResult
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import percentile
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    ClientCount,
    ReportOptions,
    RequestLengths,
    SeededRounds,
    Share,
)

if TYPE_CHECKING:
    from rich.table import Table

_REQUESTS_PER_CLIENT = 8


@MEASUREMENT
@dataclass(frozen=True)
class ChannelSweepOptions:
    concurrency: ClientCount = 32
    """Concurrent clients; each sends its next request when its last has ended."""

    requests: AtLeastOne | None = None
    """Requests of a load. Default: 8 for each client."""

    drop: Share = 0.5
    """Share of requests whose client hangs up at a random moment, in the load with drops."""

    max_running: SmallCount = 64
    """Sequences that run at once."""

    max_batch_tokens: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1 << 16))] = None
    """Tokens that one step computes at most. Default: that of the backend on a CPU."""

    @property
    def num_requests(self) -> int:
        return self.requests or _REQUESTS_PER_CLIENT * self.concurrency

    def step_tokens(self) -> int:
        """Raises StartupError for fewer tokens than sequences."""
        backend = BackendOptions(max_running=self.max_running, max_batch_tokens=self.max_batch_tokens)
        return backend.step_tokens("cpu")


class Variant(NamedTuple):
    """Most plans ahead, and whether each is made as late as possible (as the engine does) or at once."""

    capacity: int
    is_late: bool = True

    def __str__(self) -> str:
        return str(self.capacity) if self.is_late else f"{self.capacity}, at once"


class _AtOnce(StepTiming):
    def spare_s(self, running_s: float) -> float:  # noqa: ARG002 - the same for every step
        return 0.0


DEFAULT = Variant(1)
VARIANTS = (
    Variant(0),
    DEFAULT,
    Variant(4),
    Variant(1, is_late=False),
    Variant(2, is_late=False),
    Variant(4, is_late=False),
)
SPIKE_REQUESTS = 16
_SPIKES = 10


@dataclass(frozen=True, slots=True)
class VariantRound:
    steady: SimulationResult
    drops: SimulationResult
    spike: SimulationResult

    def burst_steps(self, position: int) -> float:
        """Mean steps until the first token of the request at this position in its burst; -1 is the last."""
        return statistics.mean(burst[position] for burst in self.spike.burst_steps)


@dataclass(frozen=True, slots=True)
class RoundsMedian:
    """A value over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RoundsMedian:
        return cls(statistics.median(values), min(values), max(values))

    def show(self, form: str) -> str:
        """Format with low and high, unless they look the same."""
        median, low, high = (format(value, form) for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low}–{high})"


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """One variant over the rounds."""

    name: str
    output_tokens_per_s: RoundsMedian
    idle_us: RoundsMedian
    tokens_per_step: RoundsMedian
    ttft_p50_ms: RoundsMedian
    ttft_p99_ms: RoundsMedian
    wasted_tokens: RoundsMedian
    saved_tokens: RoundsMedian
    burst_first_steps: RoundsMedian
    burst_last_steps: RoundsMedian

    @classmethod
    def of(cls, variant: Variant, rounds: Sequence[VariantRound]) -> VariantSummary:
        def figure(value: Callable[[VariantRound], float | None]) -> RoundsMedian:
            return RoundsMedian.of([value(entry) or 0.0 for entry in rounds])

        return cls(
            name=str(variant),
            output_tokens_per_s=figure(lambda entry: entry.steady.output_tokens_per_s),
            idle_us=figure(lambda entry: entry.steady.idle_us),
            tokens_per_step=figure(lambda entry: entry.steady.tokens_per_step),
            ttft_p50_ms=figure(lambda entry: percentile(entry.steady.ttfts_ms, 50)),
            ttft_p99_ms=figure(lambda entry: percentile(entry.steady.ttfts_ms, 99)),
            wasted_tokens=figure(lambda entry: entry.drops.wasted_tokens),
            saved_tokens=figure(lambda entry: entry.drops.saved_tokens),
            burst_first_steps=figure(lambda entry: entry.burst_steps(0)),
            burst_last_steps=figure(lambda entry: entry.burst_steps(-1)),
        )


@dataclass(frozen=True, slots=True)
class ChannelSweep:
    concurrency: int
    step_ms: float
    rows: list[VariantSummary]
    rounds: dict[str, list[VariantRound]]
    """Key: the name of the variant."""


def channel_sweep(
    *,
    options: ChannelSweepOptions = ChannelSweepOptions(),
    lengths: RequestLengths = RequestLengths(),
    rounds: SeededRounds = SeededRounds(),
    report: ReportOptions = ReportOptions(),
) -> int:
    plain = Workload(lengths.prompt_tokens, lengths.output_tokens, VOCAB_SIZE)
    found: dict[str, list[VariantRound]] = {str(variant): [] for variant in VARIANTS}
    with measurement_run(report.json) as run:
        with _no_collection():
            for index in range(rounds.rounds):
                for variant in VARIANTS:
                    with run.status(f"capacity {variant}, round {index + 1} of {rounds.rounds}"):
                        seed = rounds.seed + 10_000 * index
                        found[str(variant)].append(measure_variant(variant, options, plain, seed))
        summaries = [VariantSummary.of(variant, found[str(variant)]) for variant in VARIANTS]
        sweep = ChannelSweep(options.concurrency, 1000 * STEP_S, summaries, found)
        run.add("channel_sweep", sweep, sweep_table(sweep))
        for line in against_default(sweep.rows):
            run.console.print(line, highlight=False)
    return run.exit_status


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep objects from start-up out of garbage collection, as the backend does."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_variant(variant: Variant, options: ChannelSweepOptions, plain: Workload, seed: int) -> VariantRound:
    """Run one round. Equal seeds give each variant the same requests. Raises StartupError."""
    num_requests = options.num_requests
    dropping = replace(plain, drop=options.drop)

    def run(requests: Sequence[PlannedRequest], bursts: Sequence[Burst] = ()) -> SimulationResult:
        step_timing = StepTiming() if variant.is_late else _AtOnce()
        sizes = variant.capacity, options.max_running, options.step_tokens()
        simulation = Simulation(*sizes, step_timing=step_timing)
        try:
            return simulation.run(requests, options.concurrency, bursts)
        finally:
            simulation.close()

    return VariantRound(
        steady=run(plain.draw(num_requests, seed)),
        drops=run(dropping.draw(num_requests, seed + 1)),
        spike=run(plain.draw(num_requests, seed + 2), _bursts(plain, options.concurrency, num_requests, seed)),
    )


def _bursts(workload: Workload, concurrency: int, num_requests: int, seed: int) -> list[Burst]:
    """Bursts of one-token requests, spread over the load and over the length of a step."""
    one_token = replace(workload, output_tokens=Lengths(1, 1))
    lasts_s = STEP_S * workload.output_tokens.low * num_requests / concurrency
    return [
        Burst(lasts_s * (number + 1) / (_SPIKES + 1) + STEP_S * number / _SPIKES, requests)
        for number in range(_SPIKES)
        for requests in [one_token.draw(SPIKE_REQUESTS, seed + 100 * (number + 1))]
    ]


def sweep_table(sweep: ChannelSweep) -> Table:
    num_rounds = len(sweep.rounds[sweep.rows[0].name])
    title = f"Plans prepared ahead, {sweep.concurrency} clients, {sweep.step_ms:g} ms a step"
    columns = ["capa-\ncity", "output\ntok/s", "device\nwaits µs", "tokens\n/ step", "TTFT ms\np50 / p99"]
    columns += ["drops: tokens\nwasted", "bound late,\nnot wasted", "burst: steps\nto first / last"]
    table = make_table(f"{title}: medians of {num_rounds} rounds (least–most)", *columns)
    for row in sweep.rows:
        table.add_row(
            row.name,
            row.output_tokens_per_s.show(",.0f"),
            row.idle_us.show(".0f"),
            f"{row.tokens_per_step.median:.2f}",
            f"{row.ttft_p50_ms.median:.1f} / {row.ttft_p99_ms.median:.0f}",
            row.wasted_tokens.show(",.0f"),
            f"{row.saved_tokens.median:,.0f}",
            f"{row.burst_first_steps.median:.1f} / {row.burst_last_steps.median:.1f}",
        )
    return table


def against_default(rows: Sequence[VariantSummary]) -> list[str]:
    """Compare each other variant with capacity 1, planned late."""
    by_name = {row.name: row for row in rows}
    one = by_name.pop(str(DEFAULT))
    return [
        f"Capacity {name} against 1: {row.output_tokens_per_s.median / one.output_tokens_per_s.median:.3f} × the "
        f"throughput, TTFT p50 {row.ttft_p50_ms.median - one.ttft_p50_ms.median:+.1f} ms, a burst's first token "
        f"{row.burst_first_steps.median - one.burst_first_steps.median:+.1f} steps."
        for name, row in by_name.items()
    ]
