"""`penstock bench compare`: Penstock and servers of other projects, with the same requests in one run.

All servers are started before the first round and stay in memory. Only the one that is measured runs; the others are
paused (SIGSTOP), so that nobody pays for a start or disturbs another. Rounds take turns. A round in which other
processes took CPU time is repeated.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.foreign_cpu import Disturbance, ForeignCpu, WatchedRound
from penstock.tools.bench.harness.peers import Peer
from penstock.tools.bench.harness.report import make_table, ms
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import measure, warm_up
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    Counts,
    NotNegative,
    PromptOptions,
    ReportOptions,
    WarmRounds,
)

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server_process import ServerProcess
    from penstock.tools.bench.load_generator.target import Target
    from penstock.tools.bench.load_generator.workload import Workload

PENSTOCK = "penstock"
"""Name of our own server among the others."""
_REQUESTS_PER_CLIENT = 4
_TOKEN_TOLERANCE = 0.02
"""By this share, numbers of tokens may differ between servers: one may begin each prompt with a token of its own."""


def _split_lines(_type: Any, value: str, delimiter: str | None = None) -> list[str]:  # noqa: ARG001 - cyclopts's call
    return value.splitlines()


@MEASUREMENT
@dataclass(frozen=True)
class CompareOptions:
    peer: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=False,
            negative="",
            show_default=False,
            metavar="NAME=COMMAND,URL",
            env_var_split=_split_lines,
        ),
    ] = ()
    """A server to compare with: the command that starts it and the address at which it then answers. Repeat the option
    for each server; the environment variable has one server on each line."""

    concurrency: Counts = (1, 4, 16, 32)
    """Concurrent clients; each sends its next request when its last has ended."""

    requests: AtLeastOne | None = None
    """Requests of a round. Default: 4 for each client."""

    foreign_cores: Annotated[float, Parameter(validator=Number(gt=0))] = 0.1
    """Limit of the CPU time that other processes take during a round, in cores. Above it, the round is repeated."""

    max_repeats: NotNegative = 3
    """Repetitions of a disturbed round; if all are disturbed, the least disturbed one counts and is marked."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    process: ServerProcess
    address: ServerAddress


@dataclass(frozen=True, slots=True)
class Figures:
    """What is compared. None if no answer had such an event."""

    output_tokens_per_s: float | None
    ttft_p50_ms: float | None
    itl_p50_ms: float | None

    @classmethod
    def of(cls, item: WatchedRound) -> Figures:
        summary = item.summary
        return cls(summary.output_tokens_per_s, summary.ttft_ms.p50, summary.itl_ms.p50)

    def values(self) -> tuple[float | None, ...]:
        return self.output_tokens_per_s, self.ttft_p50_ms, self.itl_p50_ms

    def over(self, other: Figures) -> Figures:
        pairs = zip(self.values(), other.values(), strict=True)
        return Figures(*(a / b if a is not None and b else None for a, b in pairs))

    @classmethod
    def medians(cls, items: Sequence[Figures]) -> Figures:
        columns = zip(*(item.values() for item in items), strict=True)
        return cls(*map(_median, columns))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One server under one load."""

    server: str
    concurrency: int
    medians: Figures
    ratios: Figures | None
    """Penstock / this server: medians of the rounds' ratios. None for Penstock itself."""
    num_disturbed: int
    """Rounds that were still disturbed in their last repetition."""
    rounds: list[WatchedRound]


@dataclass(frozen=True, slots=True)
class Comparison:
    peers: list[Peer]
    foreign_cores_limit: float
    rows: list[ComparedRow]


def compare(
    *,
    options: CompareOptions = CompareOptions(),
    prompts: PromptOptions = PromptOptions(),
    rounds: WarmRounds = WarmRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        peers = parse_peers(options.peer)
        disturbance = Disturbance(options.foreign_cores, options.max_repeats)
        with ExitStack() as stack:
            contenders = list(_start(run, stack, server, peers, prompts))
            rows = uvloop.run(_measure_all(run, contenders, options, prompts, rounds, disturbance))
        run.add("compare", Comparison(peers, options.foreign_cores, rows), compare_table(rows))
        for line in warnings(rows):
            run.console.print(line, style="red", markup=False, soft_wrap=True)
        if any(item.summary.failed for row in rows for item in row.rounds):
            run.exit_status = 1
    return run.exit_status


def parse_peers(texts: Sequence[str]) -> list[Peer]:
    """Raises BenchError."""
    peers = [Peer.parse(text) for text in texts]
    names = [PENSTOCK, *(peer.name for peer in peers)]
    if len(names) == 1:
        raise BenchError("compare needs at least one --peer NAME=COMMAND,URL")
    if len(names) != len(set(names)):
        raise BenchError(f"each server needs a name of its own, but they are {', '.join(names)}")
    return peers


def _start(
    run: MeasurementRun, stack: ExitStack, server: BenchServerOptions, peers: Sequence[Peer], prompts: PromptOptions
) -> Iterator[Contender]:
    """Start the servers one by one; each is paused before the next one starts. Raises BenchError."""
    ours = stack.enter_context(run.server(server))
    stack.enter_context(ours.process.paused())
    yield Contender(PENSTOCK, ours.process, ours.address)
    for peer in peers:
        process = stack.enter_context(run.peer(peer, prompts.endpoint))
        stack.enter_context(process.paused())
        yield Contender(peer.name, process, ServerAddress(peer.url))


async def _measure_all(
    run: MeasurementRun,
    contenders: Sequence[Contender],
    options: CompareOptions,
    prompts: PromptOptions,
    rounds: WarmRounds,
    disturbance: Disturbance,
) -> list[ComparedRow]:
    """Raises BenchError."""
    async with AsyncExitStack() as stack:
        sides = []
        for contender in contenders:
            with contender.process.running():
                sides.append((contender, await stack.enter_async_context(contender.address.connect(prompts.endpoint))))
        workload = prompts.prompts(sides[0][1])  # ids of our vocabulary: all servers receive the same prompts
        rows = []
        for place, concurrency in enumerate(options.concurrency):
            num_requests = options.requests or _REQUESTS_PER_CLIENT * concurrency
            load = RoundLoad(workload, num_requests, concurrency, rounds.warmup)
            found: dict[str, list[WatchedRound]] = {contender.name: [] for contender in contenders}
            for index in range(rounds.rounds):
                seed = rounds.seed + 1_000_003 * place + 1_009 * index
                for contender, target in (sides[index % len(sides) :] + sides)[: len(sides)]:
                    with run.status(f"{concurrency} clients, round {index + 1} of {rounds.rounds}, {contender.name}"):
                        attempts = RoundAttempts(contender, target, load, seed)
                        found[contender.name].append(await disturbance.repeat(attempts.run))
            rows += compared_rows(concurrency, found, disturbance)
    return rows


@dataclass(frozen=True, slots=True)
class RoundLoad:
    workload: Workload
    num_requests: int
    concurrency: int
    warmup: int


class RoundAttempts:
    """One round of one server. Each attempt draws new prompts, so that no cache answers."""

    def __init__(self, contender: Contender, target: Target, load: RoundLoad, seed: int) -> None:
        self._contender, self._target, self._load = contender, target, load
        self._seeds = itertools.count(seed)

    async def run(self) -> WatchedRound:
        """Raises BenchError."""
        target, load, seed = self._target, self._load, next(self._seeds)
        process = self._contender.process
        with process.running():
            await warm_up(target, load.workload, load.warmup, load.concurrency, seed)
            foreign = ForeignCpu(process.pid)
            summary = await measure(target, load.workload, load.num_requests, load.concurrency, seed)
            return WatchedRound(summary, foreign.cores())


def compared_rows(
    concurrency: int, found: dict[str, list[WatchedRound]], disturbance: Disturbance
) -> list[ComparedRow]:
    figures = {name: [Figures.of(item) for item in rounds] for name, rounds in found.items()}
    rows = []
    for name, rounds in found.items():
        pairs = zip(figures[PENSTOCK], figures[name], strict=True)
        ratios = Figures.medians([ours.over(theirs) for ours, theirs in pairs]) if name != PENSTOCK else None
        num_disturbed = sum(map(disturbance.has_disturbed, rounds))
        rows.append(ComparedRow(name, concurrency, Figures.medians(figures[name]), ratios, num_disturbed, rounds))
    return rows


def compare_table(rows: Sequence[ComparedRow]) -> Table:
    columns = ["load", "server", "output\ntok/s", "TTFT ms\np50", "ITL ms\np50", "tok/\nevent"]
    columns += [f"ratio\n{name}" for name in ("tok/s", "TTFT", "ITL")]
    columns += ["sent\nagain", "er-\nrors", "foreign\ncores", "re-\npeated"]
    table = make_table("Medians of the rounds; ratios are penstock / the server", *columns)
    for row in rows:
        summaries = [item.summary for item in row.rounds]
        tokens_per_s, ttft_ms, itl_ms = row.medians.values()
        ratios = row.ratios.values() if row.ratios is not None else (None, None, None)
        table.add_row(
            f"c={row.concurrency}" if row.ratios is None else "",
            row.server,
            f"{tokens_per_s:,.0f}",
            ms(ttft_ms),
            ms(itl_ms),
            f"{statistics.median(item.output_tokens / max(item.events, 1) for item in summaries):.1f}",
            *("" if row.ratios is None else "–" if ratio is None else f"{ratio:.2f} ×" for ratio in ratios),
            str(sum(item.sent_again for item in summaries)),
            str(sum(item.failed for item in summaries)),
            f"{max(item.foreign_cores for item in row.rounds):.2f}",
            str(sum(item.attempts - 1 for item in row.rounds)),
        )
    return table


def warnings(rows: Sequence[ComparedRow]) -> Iterator[str]:
    """Tell what makes figures doubtful. Each load begins with the row of Penstock."""
    ours = (0.0, 0.0)
    for row in rows:
        name = f"c={row.concurrency}, {row.server}"
        if row.num_disturbed:
            yield f"{name}: {row.num_disturbed} of {len(row.rounds)} rounds were disturbed in every attempt"
        error = next((item.summary.first_error for item in row.rounds if item.summary.first_error), "")
        if error:
            yield f"{name}: first error: {error}"
        tokens = _tokens_per_request(row)
        if row.ratios is None:
            ours = tokens
        elif not error and any(abs(a - b) > _TOKEN_TOLERANCE * b for a, b in zip(tokens, ours, strict=True)):
            theirs, reference = (f"{prompt:.0f} prompt and {output:.0f} output" for prompt, output in (tokens, ours))
            yield f"{name}: {theirs} tokens a request, but {reference} tokens with {PENSTOCK}"


def _tokens_per_request(row: ComparedRow) -> tuple[float, float]:
    """Return the mean lengths of prompt and answer."""
    summaries = [item.summary for item in row.rounds]
    num_requests = sum(item.requests for item in summaries)
    num_prompt_tokens = sum(item.prompt_tokens for item in summaries)
    return num_prompt_tokens / num_requests, sum(item.output_tokens for item in summaries) / num_requests
