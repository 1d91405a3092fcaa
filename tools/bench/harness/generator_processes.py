"""Load generators in processes of their own: one generator process is hardly faster than one frontend worker."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from penstock.process.children import stop_with_parent
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.sending import run_closed_loop
from penstock.tools.bench.load_generator.stats import Outcome
from penstock.tools.bench.load_generator.workload import Lengths, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from penstock.tools.bench.load_generator.target import Endpoint, ServerAddress


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The requests of each client. Prompts are random words, so that the worker has to tokenize them."""

    name: str
    endpoint: Endpoint
    prompt_words: int
    output_tokens: int
    requests_per_client: int


@dataclass(frozen=True, slots=True)
class GeneratorOrder:
    """Instructions for one generator process, pickled to it."""

    address: ServerAddress
    load: WorkerLoad
    num_requests: int
    num_clients: int
    seed: int


@dataclass(frozen=True, slots=True)
class GeneratorResult:
    """The observations of one generator process. Times are time.perf_counter() seconds, one clock for all processes."""

    from_s: float = 0.0
    to_s: float = 0.0
    output_tokens: int = 0
    num_events: int = 0
    cpu_s: float = 0.0


class GeneratorProcess:
    """One load generator. Each order is prepared first and sent when started, so that several can start together."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_generate, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def prepare(self, order: GeneratorOrder) -> None:
        self._pipe.send(order)

    def wait_until_prepared(self) -> None:
        """Raises BenchError."""
        self._receive()

    def start(self) -> None:
        self._pipe.send("go")

    def result(self) -> GeneratorResult:
        """Wait for the end of the order. Raises BenchError if a request failed."""
        return self._receive()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _receive(self) -> GeneratorResult:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise BenchError("a generator process ended during the run") from None
        if not isinstance(answer, GeneratorResult):
            raise BenchError(str(answer))
        return answer


@contextmanager
def generator_processes(count: int) -> Iterator[list[GeneratorProcess]]:
    processes = [GeneratorProcess() for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def _generate(pipe: Connection) -> None:
    """The main function of a generator process. It answers each order twice: when prepared and when done."""
    stop_with_parent()
    try:
        while True:
            uvloop.run(_send_all(pipe.recv(), pipe))
    except BenchError as error:
        pipe.send(str(error))


async def _send_all(order: GeneratorOrder, pipe: Connection) -> None:
    """Raises BenchError."""
    load = order.load
    lengths = Lengths(load.prompt_words, load.prompt_words), Lengths(load.output_tokens, load.output_tokens)
    requests = Workload(*lengths).draw(order.num_requests, order.seed)
    async with order.address.connect(load.endpoint) as target:
        pipe.send(GeneratorResult())
        pipe.recv()
        before_s = time.process_time()
        records = await run_closed_loop(target, requests, order.num_clients)
        cpu_s = time.process_time() - before_s
    for record in records:
        if record.outcome is not Outcome.COMPLETED:
            raise BenchError(f"a request failed: {record.error}")
    result = GeneratorResult(
        from_s=min(record.started_s for record in records),
        to_s=max(record.ended_s for record in records),
        output_tokens=sum(record.output_tokens for record in records),
        num_events=sum(len(record.event_times_s) for record in records),
        cpu_s=cpu_s,
    )
    pipe.send(result)
