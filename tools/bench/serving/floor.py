"""`penstock bench floor`: the decode step of the whole server against the bare work of that step.

The bare work (`bare_step`) is the linears and the attention at the benchmark's context, measured in a process of its
own. The engine's step is measured from outside, over HTTP: all requests arrive at once, and the step is the mean time
between two tokens of a stream while every stream decodes, from the last first token to the first last token.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import uvloop

from penstock.backend.options import BackendOptions
from penstock.process.options import to_argv
from penstock.process.supervisor import module_argv
from penstock.serve.options import ServeOptions, select_options
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import run_open_loop, warm_up
from penstock.tools.bench.load_generator.stats import Aim, ObservedRequest, Outcome
from penstock.tools.bench.options import (
    MEASUREMENT,
    BenchServerOptions,
    Counts,
    ReportOptions,
    RequestLengths,
    WarmRounds,
)

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.target import Target
    from penstock.tools.bench.load_generator.workload import Workload


@MEASUREMENT
@dataclass(frozen=True)
class FloorOptions:
    concurrency: Counts = (1, 4, 16, 32)
    """Batch sizes: sequences that decode together. The table gets one row for each."""


class BareStep(msgspec.Struct, frozen=True):
    """One decode step of batch_size rows on the bare pass, in ms: its parts, their sum, and the pass's whole step."""

    batch_size: int
    linear_ms: float
    attention_ms: float
    bare_ms: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The same step through the whole server."""

    bare: BareStep
    engine_ms: float

    @property
    def ratio(self) -> float:
        return self.engine_ms / self.bare.bare_ms

    def aim(self) -> Aim:
        return Aim(f"decode step, engine / bare work, batch {self.bare.batch_size}", self.ratio, "at most", 1.5)


def floor(
    *,
    options: FloorOptions = FloorOptions(),
    lengths: RequestLengths = RequestLengths(),
    rounds: WarmRounds = WarmRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    # The mean context of the measured steps: halfway through the answer.
    context_tokens = lengths.prompt_tokens.high + lengths.output_tokens.high // 2
    with measurement_run(report.json) as run:
        with run.status("the bare work of a step"):
            bare = measure_bare_steps(server, options.concurrency, context_tokens)
        with run.server(server) as own:
            steps = uvloop.run(_measure_engine(run, own, bare, lengths, rounds))
        run.add("floor", steps, floor_table(steps, context_tokens), [step.aim() for step in steps])
    return run.exit_status


async def _measure_engine(
    run: MeasurementRun, server: BenchServer, bare: Sequence[BareStep], lengths: RequestLengths, rounds: WarmRounds
) -> list[EngineStep]:
    steps = []
    async with server.address.connect() as target:
        workload = lengths.workload(target)
        await warm_up(target, workload, rounds.warmup, rounds.warmup, rounds.seed)
        for number, step in enumerate(bare):
            first_seed = rounds.seed + 1000 * number
            seeds = range(first_seed, first_seed + rounds.rounds)
            with run.status(f"the engine's step, batch {step.batch_size}"):
                engine_ms = await measure_engine_step_ms(target, workload, step.batch_size, seeds)
            steps.append(EngineStep(step, engine_ms))
    return steps


def decode_step_s(records: Sequence[ObservedRequest]) -> float:
    """Return the seconds of one step while all requests decode. Raises BenchError if they never decode together."""
    for record in records:
        if record.outcome is not Outcome.COMPLETED or not record.event_times_s:
            raise BenchError(f"a request of the measurement failed: {record.error}")
    from_s = max(record.event_times_s[0] for record in records)
    to_s = min(record.event_times_s[-1] for record in records)
    steps_s = []
    for record in records:
        inside = [at_s for at_s in record.event_times_s if from_s <= at_s <= to_s]
        if len(inside) < 2:
            raise BenchError("the requests did not decode together; raise --output-tokens")
        tokens_per_event = record.output_tokens / len(record.event_times_s)
        steps_s.append((inside[-1] - inside[0]) / (len(inside) - 1) / tokens_per_event)
    return sum(steps_s) / len(steps_s)


def measure_bare_steps(options: ServeOptions, batch_sizes: Sequence[int], context_tokens: int) -> list[BareStep]:
    """Raises BenchError; the child prints the reason on standard error."""
    sizes = ["--batch-sizes", ",".join(map(str, batch_sizes)), "--context", str(context_tokens)]
    child = subprocess.run(
        module_argv(
            "penstock.tools.bench.serving.bare_step", [*sizes, *to_argv(select_options(options, BackendOptions))]
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    if child.returncode != 0:
        raise BenchError("the bare work of a step could not be measured")
    return msgspec.json.decode(child.stdout, type=list[BareStep])


async def measure_engine_step_ms(target: Target, workload: Workload, batch_size: int, seeds: Sequence[int]) -> float:
    """Return the median over runs, one for each seed."""
    steps_s = [decode_step_s(await run_open_loop(target, workload.draw(batch_size, seed))) for seed in seeds]
    return 1000 * statistics.median(steps_s)


def floor_table(steps: Sequence[EngineStep], context_tokens: int) -> Table:
    columns = ("batch", "linears ms", "attention ms", "bare work ms", "bare pass ms", "engine ms", "engine / bare work")
    table = make_table(f"One decode step at a context of {context_tokens} tokens", *columns)
    for step in steps:
        bare = step.bare
        parts = (bare.linear_ms, bare.attention_ms, bare.bare_ms, bare.step_ms, step.engine_ms)
        table.add_row(str(bare.batch_size), *(f"{value:.2f}" for value in parts), f"{step.ratio:.2f} ×")
    return table
