"""One frontend worker against two, in front of a model that costs nothing: what a second one adds, who is the limit.

Both servers stand through the whole run and take turns. The load comes from two processes, half of the clients each:
one generator is hardly faster than one worker.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvloop

from penstock.tools.bench.harness.processes import process_use, stop_with_parent
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.bench.load_generator.sending import BenchError, Endpoint, Target, run_closed_loop
from penstock.tools.bench.load_generator.stats import Aim, Outcome
from penstock.tools.bench.load_generator.workload import Lengths, Workload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rich.console import Console
    from rich.table import Table

    from penstock.tools.bench.harness.run import Bench
    from penstock.tools.bench.harness.server import BenchServer

NUM_CLIENTS = 64
NUM_GENERATORS = 2
MIN_CORES = 4
"""Two workers, the backend and the generators: with fewer a second worker has no core of its own."""
RATIO_LIMIT = 1.8
_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What each client sends. Prompts are random words, which the worker makes
    tokens of."""

    name: str
    endpoint: Endpoint
    prompt_words: int
    output_tokens: int
    requests_per_client: int


LOADS = (
    WorkerLoad("streams of 256 tokens", "completions", prompt_words=32, output_tokens=256, requests_per_client=8),
    WorkerLoad("answers of one token", "chat", prompt_words=16, output_tokens=1, requests_per_client=32),
)


@dataclass(frozen=True, slots=True)
class _Order:
    """What a generator is told. It holds no model and shares nothing with the others."""

    url: str
    api_key: str | None
    load: WorkerLoad
    num_requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a generator found; times are time.perf_counter() seconds, which all processes have in common."""

    from_s: float = 0.0
    to_s: float = 0.0
    output_tokens: int = 0
    num_events: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkersRun:
    """One load on one server. CPU time is user and system, of all threads."""

    workers: int
    duration_s: float
    output_tokens: int
    events: int
    worker_cpu_s: list[float]
    """Of each of the frontend's processes; the one that watches over the workers is the first."""
    backend_cpu_s: float
    generator_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Of the frontend's CPU time, which is counted in ticks."""
        return self.output_tokens / max(sum(self.worker_cpu_s), _TICK_S)


@dataclass(frozen=True, slots=True)
class Scaling:
    """One load's rounds; ratios are medians of the rounds' ratios, two workers by one."""

    load: str
    one: list[WorkersRun]
    two: list[WorkersRun]
    tokens_per_s_ratio: float
    tokens_per_cpu_s_ratio: float

    @classmethod
    def of(cls, load: str, one: list[WorkersRun], two: list[WorkersRun]) -> Scaling:
        pairs = list(zip(one, two, strict=True))
        return cls(
            load,
            one,
            two,
            tokens_per_s_ratio=statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in pairs),
            tokens_per_cpu_s_ratio=statistics.median(b.tokens_per_cpu_s / a.tokens_per_cpu_s for a, b in pairs),
        )


def run_workers_scaling(bench: Bench, console: Console) -> bool:
    found = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(bench.bench_server(replace(bench.server, forward_pass="fake", workers=workers)))  # noqa: S106
            for workers in (1, 2)
        ]
        pipes = stack.enter_context(_generators())
        for load in LOADS:
            with bench.progress.status(f"{load.name}, one worker and two"):
                found.append(_measure_load(bench, servers, load, pipes))
    cores = bench.report.machine.cores
    bench.report.sections["workers_scaling"] = found
    bench.report.aims += scaling_aims(found, cores)
    console.print(scaling_table(found))
    if cores < MIN_CORES:
        console.print(
            f"What two workers give on free cores is not measurable here: this machine has {cores}, and workers, "
            f"backend and generators want {MIN_CORES}.",
            soft_wrap=True,
        )
    return True


def scaling_aims(found: Sequence[Scaling], cores: int) -> list[Aim]:
    """None where there are no cores to scale to."""
    if cores < MIN_CORES:
        return []
    name = "two workers / one, tokens per second"
    return [Aim(f"{name}, {item.load}", item.tokens_per_s_ratio, "at least", RATIO_LIMIT) for item in found]


def _measure_load(
    bench: Bench, servers: Sequence[BenchServer], load: WorkerLoad, pipes: Sequence[Connection]
) -> Scaling:
    """Raises BenchError where a request fails."""
    num_requests = bench.options.requests or load.requests_per_client * NUM_CLIENTS
    api_key = bench.server.api_key[0] if bench.server.api_key else None
    one: list[WorkersRun] = []
    two: list[WorkersRun] = []
    for index in range(-1, bench.num_rounds):  # the first is for warming up
        seed = bench.options.seed + NUM_GENERATORS * (index + 1)
        for workers, server, runs in ((1, servers[0], one), (2, servers[1], two)):
            order = _Order(server.url, api_key, load, max(1, num_requests // NUM_GENERATORS), seed)
            orders = [replace(order, seed=seed + number) for number in range(NUM_GENERATORS)]
            run = _measure(workers, server, orders, pipes)
            if index >= 0:
                runs.append(run)
    return Scaling.of(load.name, one, two)


def _measure(workers: int, server: BenchServer, orders: Sequence[_Order], pipes: Sequence[Connection]) -> WorkersRun:
    """Raises BenchError."""
    for order, pipe in zip(orders, pipes, strict=True):
        pipe.send(order)
    for pipe in pipes:
        _receive(pipe)
    pids = [server.backend_pid(), *server.frontend_pids()]
    before_s = [process_use(pid).cpu_s for pid in pids]
    for pipe in pipes:
        pipe.send("go")
    sent = [_receive(pipe) for pipe in pipes]
    backend_cpu_s, *worker_cpu_s = (process_use(pid).cpu_s - cpu_s for pid, cpu_s in zip(pids, before_s, strict=True))
    return WorkersRun(
        workers=workers,
        duration_s=max(item.to_s for item in sent) - min(item.from_s for item in sent),
        output_tokens=sum(item.output_tokens for item in sent),
        events=sum(item.num_events for item in sent),
        worker_cpu_s=worker_cpu_s,
        backend_cpu_s=backend_cpu_s,
        generator_cpu_s=sum(item.cpu_s for item in sent),
    )


@contextmanager
def _generators() -> Iterator[list[Connection]]:
    """Processes that send what they are ordered to."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for _ in range(NUM_GENERATORS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_generate, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _receive(pipe: Connection) -> _Sent:
    """Raises BenchError: what the generator says went wrong, or that it has ended."""
    try:
        answer = pipe.recv()
    except EOFError:
        raise BenchError("a generator ended during the run") from None
    if not isinstance(answer, _Sent):
        raise BenchError(str(answer))
    return answer


def _generate(pipe: Connection) -> None:
    """A generator's whole life: orders, each answered twice, when it is ready and when it is done."""
    stop_with_parent()
    try:
        while True:
            uvloop.run(_send_all(pipe.recv(), pipe))
    except BenchError as error:
        pipe.send(str(error))


async def _send_all(order: _Order, pipe: Connection) -> None:
    """Raises BenchError."""
    load = order.load
    http = HttpClient(order.url, order.api_key)
    target = await Target.discover(http, load.endpoint, None)
    lengths = Lengths(load.prompt_words, load.prompt_words), Lengths(load.output_tokens, load.output_tokens)
    requests = Workload(*lengths).draw(order.num_requests, order.seed)
    pipe.send(_Sent())
    pipe.recv()
    before_s = time.process_time()
    records = await run_closed_loop(target, requests, NUM_CLIENTS // NUM_GENERATORS)
    cpu_s = time.process_time() - before_s
    http.close()
    for record in records:
        if record.outcome is not Outcome.COMPLETED:
            raise BenchError(f"a request failed: {record.error}")
    sent = _Sent(
        from_s=min(record.started_s for record in records),
        to_s=max(record.ended_s for record in records),
        output_tokens=sum(record.output_tokens for record in records),
        num_events=sum(len(record.event_times_s) for record in records),
        cpu_s=cpu_s,
    )
    pipe.send(sent)


def scaling_table(found: Sequence[Scaling]) -> Table:
    """The round of the median speed of each side; cores are CPU seconds by seconds, of all processes of a part."""
    columns = ("load", "workers", "output\ntok/s", "tok/\nevent", "tok / CPU s\nof workers")
    table = make_table("One frontend worker and two", *columns, "cores:\nworkers", "backend", "generators")
    for scaling in found:
        for runs in (scaling.one, scaling.two):
            run = sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]
            cores = (sum(run.worker_cpu_s), run.backend_cpu_s, run.generator_cpu_s)
            table.add_row(
                scaling.load if runs is scaling.one else "",
                str(run.workers),
                f"{run.tokens_per_s:,.0f}",
                f"{run.output_tokens / max(run.events, 1):.1f}",
                f"{run.tokens_per_cpu_s:,.0f}",
                *(f"{cpu_s / run.duration_s:.2f}" for cpu_s in cores),
            )
        ratios = f"{scaling.tokens_per_s_ratio:.2f} ×", "", f"{scaling.tokens_per_cpu_s_ratio:.2f} ×"
        table.add_row("", "2 / 1", *ratios, "", "", "")
    return table
