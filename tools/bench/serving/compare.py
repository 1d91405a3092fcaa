"""`penstock bench compare`: Penstock and servers of other projects, with the same requests in one run.

All servers are started before the first round and stay in memory. Only the one that is measured runs; the others are
paused (SIGSTOP), so that nobody pays for a start or disturbs another. Rounds take turns. A round in which other
processes took CPU time is repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.comparison import (
    PENSTOCK,
    ComparedRow,
    Rounds,
    compare_table,
    compared_rows,
    warnings,
)
from penstock.tools.bench.harness.foreign_cpu import Disturbance, ForeignCpu, WatchedRound
from penstock.tools.bench.harness.peers import Peer, completion_probe
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.harness.server_process import ServerProcess
from penstock.tools.bench.load_generator.sending import measure, warm_up
from penstock.tools.bench.load_generator.target import ServerAddress, Target
from penstock.tools.bench.load_generator.workload import Workload
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

_REQUESTS_PER_CLIENT = 4


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
class Comparison:
    peers: list[Peer]
    foreign_cores_limit: float
    rows: list[ComparedRow] = field(default_factory=list)


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
        found = Comparison(peers, options.foreign_cores)
        with ExitStack() as stack:
            contenders = list(_start(run, stack, server, peers, prompts))
            uvloop.run(_measure_all(run, contenders, options, prompts, rounds, found))
        run.add("compare", found, compare_table(found.rows))
        for line in warnings(found.rows):
            run.console.print(line, style="red", markup=False, soft_wrap=True)
        if any(item.summary.failed for row in found.rows for item in row.rounds):
            run.exit_status = 1
    return run.exit_status


def parse_peers(texts: Sequence[str]) -> list[Peer]:
    """Raises BenchError."""
    peers = [Peer.parse(text) for text in texts]
    names = [PENSTOCK, *(peer.name for peer in peers)]
    if not peers:
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
        process = stack.enter_context(run.peer(peer, completion_probe(prompts.endpoint)))
        stack.enter_context(process.paused())
        yield Contender(peer.name, process, ServerAddress(peer.url))


async def _measure_all(
    run: MeasurementRun,
    contenders: Sequence[Contender],
    options: CompareOptions,
    prompts: PromptOptions,
    rounds: WarmRounds,
    found: Comparison,
) -> None:
    """Add the rows to `found`. Raises BenchError."""
    disturbance = Disturbance(options.foreign_cores, options.max_repeats)
    async with AsyncExitStack() as stack:
        sides = []
        for contender in contenders:
            with contender.process.running():
                connection = contender.address.connect(prompts.endpoint, prompts.sampling())
                sides.append((contender, await stack.enter_async_context(connection)))
        workload = prompts.prompts(sides[0][1])  # ids of our vocabulary: all servers receive the same prompts
        for place, concurrency in enumerate(options.concurrency):
            num_requests = options.requests or _REQUESTS_PER_CLIENT * concurrency
            load = RoundLoad(workload, num_requests, concurrency, rounds.warmup)
            results: Rounds = {contender.name: [] for contender in contenders}
            for index in range(rounds.rounds):
                seed = rounds.seed + 1_000_003 * place + 1_009 * index
                for contender, target in (sides[index % len(sides) :] + sides)[: len(sides)]:
                    with run.status(f"{concurrency} clients, round {index + 1} of {rounds.rounds}, {contender.name}"):
                        attempts = RoundAttempts(contender, target, load, seed)
                        results[contender.name].append(await disturbance.repeat(attempts.run))
            found.rows.extend(compared_rows(concurrency, results, disturbance))


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
