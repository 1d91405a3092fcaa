"""`penstock bench embeddings`: texts to vectors, beside other servers and libraries.

All contenders are loaded before the first round and stay in memory; only the one that is measured runs. Rounds take
turns. Servers get requests of --batch-inputs inputs from --clients clients; a library gets the inputs of all requests
in one call and sorts and batches them as it likes. Then single short inputs give the latency.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter
from rich.table import Table

from penstock.tools.bench.encoders.inputs import Batch, InputLength, draw_batches
from penstock.tools.bench.encoders.library_process import Library, LibraryProcess, library_process
from penstock.tools.bench.encoders.sending import EmbeddingRound, EmbeddingTarget, send_all
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.comparison import PENSTOCK
from penstock.tools.bench.harness.foreign_cpu import ForeignCpu
from penstock.tools.bench.harness.peers import Peer, Probe
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.harness.server_process import ServerProcess
from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.bench.load_generator.stats import percentile
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    ClientCount,
    ReportOptions,
    SeededRounds,
)

_REPEATED = Parameter(consume_multiple=False, negative="", show_default=False)


@MEASUREMENT
@dataclass(frozen=True)
class EmbeddingOptions:
    lengths: Annotated[tuple[str, ...], _REPEATED] = ("16", "128", "512", "mix")
    """Tokens of each input, special ones included; mix is 16, 128 and 512 in the ratio 6 : 3 : 1. Repeat the option."""

    inputs: AtLeastOne = 256
    """Inputs of a round of 128 tokens. Rounds of other lengths have about as many tokens."""

    batch_inputs: AtLeastOne = 32
    """Inputs of a request."""

    clients: ClientCount = 4
    """Concurrent clients; each sends its next request when its last has ended."""

    short_requests: AtLeastOne = 50
    """Single inputs of 16 tokens, one after the other, of the latency."""

    peer: Annotated[tuple[str, ...], _REPEATED, Parameter(metavar="NAME=COMMAND,URL")] = ()
    """A server with /v1/embeddings to compare with: see `penstock bench compare`. A URL that ends in /embeddings is the
    whole path."""

    library: Annotated[tuple[str, ...], _REPEATED, Parameter(metavar="LIBRARY,DTYPE=PYTHON")] = ()
    """A library to compare with, sentence-transformers or onnxruntime, in fp32 or bf16, and the interpreter that has
    it. penstock is our forward pass without a server."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The rounds of one contender with inputs of one length."""

    contender: str
    length: str
    tokens_per_s: list[float] = field(default_factory=list)
    inputs_per_s: list[float] = field(default_factory=list)
    request_p50_ms: list[float] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)

    def add(self, found: EmbeddingRound, foreign_cores: float) -> None:
        self.tokens_per_s.append(found.tokens / found.wall_s)
        self.inputs_per_s.append(found.inputs / found.wall_s)
        self.request_p50_ms.append(1000 * (percentile(found.latencies_s, 50) or 0.0))
        self.foreign_cores.append(foreign_cores)


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    rows: list[Measured] = field(default_factory=list)
    latency: list[Measured] = field(default_factory=list)


class ServerContender:
    """A server that this measurement started."""

    def __init__(self, name: str, process: ServerProcess, address: ServerAddress, path: str) -> None:
        self.name = name
        self.process = process
        self._address = address
        self._path = path

    async def run(self, batches: Sequence[Batch], clients: int) -> EmbeddingRound:
        """Raises BenchError."""
        http = HttpClient(self._address.url, self._address.api_key)
        try:
            target = await EmbeddingTarget.discover(http, self._path)
            return await send_all(target, batches, clients)
        finally:
            http.close()


class LibraryContender:
    def __init__(self, process: LibraryProcess) -> None:
        self.name = process.name
        self.process = process

    async def run(self, batches: Sequence[Batch], clients: int) -> EmbeddingRound:
        """One call with all inputs; with one client, a call for each request. Raises BenchError."""
        calls = [[text for batch in batches for text in batch.texts]] if clients > 1 else [b.texts for b in batches]
        seconds = [self.process.encode(texts) for texts in calls]
        num_inputs = sum(len(batch.texts) for batch in batches)
        return EmbeddingRound(num_inputs, sum(batch.num_tokens for batch in batches), sum(seconds), seconds)


def embeddings(
    *,
    options: EmbeddingOptions = EmbeddingOptions(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run, ExitStack() as stack:
        lengths = [InputLength.parse(text) for text in options.lengths]
        own = stack.enter_context(run.server(server))
        stack.enter_context(own.process.paused())
        ours = ServerContender(PENSTOCK, own.process, own.address, "/v1/embeddings")
        others = _start_others(run, stack, options, server.model)
        found = EmbeddingResult()
        uvloop.run(_measure(run, [ours, *others], lengths, options, rounds, found))
        run.add("embeddings", found, throughput_table(found.rows))
        run.add("embeddings", found, latency_table(found.latency))
    return run.exit_status


def _start_others(
    run: MeasurementRun, stack: ExitStack, options: EmbeddingOptions, model: str | None
) -> list[ServerContender | LibraryContender]:
    """Raises BenchError."""
    others: list[ServerContender | LibraryContender] = []
    for text in options.peer:
        peer = Peer.parse(text)
        path = "/embeddings" if peer.url.endswith("/embeddings") else "/v1/embeddings"
        peer = Peer(peer.name, peer.command, peer.url.removesuffix("/embeddings"))
        process = stack.enter_context(run.peer(peer, _probe(path)))
        stack.enter_context(process.paused())
        others.append(ServerContender(peer.name, process, ServerAddress(peer.url), path))
    for text in options.library:
        library = Library.parse(text)
        if model is None or not Path(model).is_dir():
            raise BenchError("--library needs a --model that is a directory")
        with run.status(f"loading {library.name}"):
            others.append(LibraryContender(stack.enter_context(library_process(library, Path(model)))))
    return others


def _probe(path: str) -> Probe:
    async def ask(address: ServerAddress) -> str:
        http = HttpClient(address.url)
        try:
            await send_all(await EmbeddingTarget.discover(http, path), [Batch(["hello"], 3)], 1)
        finally:
            http.close()
        return ""

    return ask


def num_batches(length: InputLength, options: EmbeddingOptions) -> int:
    """Requests of a round: about as many tokens for every length, and one for each client at least."""
    tokens = {"mix": 99}.get(length.name) or int(length.name)
    return max(options.clients, round(options.inputs * 128 / tokens / options.batch_inputs))


async def _measure(
    run: MeasurementRun,
    contenders: Sequence[ServerContender | LibraryContender],
    lengths: Sequence[InputLength],
    options: EmbeddingOptions,
    rounds: SeededRounds,
    found: EmbeddingResult,
) -> None:
    """Add to `found`. Raises BenchError."""
    for place, length in enumerate(lengths):
        rows = [Measured(contender.name, length.name) for contender in contenders]
        for index in range(rounds.rounds + 1):  # the first one warms up
            order = [(place + index) % len(contenders) for place in range(len(contenders))]
            for number in order:
                contender, seed = contenders[number], rounds.seed + 1009 * index + 100_003 * place
                batches = draw_batches(length, num_batches(length, options), options.batch_inputs, seed)
                text = f"{length.name} tokens, round {index} of {rounds.rounds}, {contender.name}"
                with run.status(text), contender.process.running():
                    foreign = ForeignCpu(contender.process.pid)
                    item = await contender.run(batches, options.clients)
                if index:
                    rows[number].add(item, foreign.cores())
        found.rows.extend(rows)
    short = InputLength("16")
    for contender in contenders:
        row = Measured(contender.name, "one of 16")
        with contender.process.running():
            for seed in (rounds.seed + 1, rounds.seed + 2):
                foreign = ForeignCpu(contender.process.pid)
                item = await contender.run(draw_batches(short, options.short_requests, 1, seed), 1)
        row.add(item, foreign.cores())
        found.latency.append(row)


def throughput_table(rows: Sequence[Measured]) -> Table:
    table = make_table(
        "Medians of the rounds; ratios are penstock / the other",
        *("input", "contender", "tokens/s", "inputs/s", "request ms\np50", "ratio", "foreign\ncores"),
    )
    own: dict[str, Measured] = {row.length: row for row in rows if row.contender == PENSTOCK}
    for row in rows:
        pairs = zip(own[row.length].tokens_per_s, row.tokens_per_s, strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        is_own = row.contender == PENSTOCK
        table.add_row(
            row.length if is_own else "",
            row.contender,
            f"{statistics.median(row.tokens_per_s):,.0f}",
            f"{statistics.median(row.inputs_per_s):,.0f}",
            f"{statistics.median(row.request_p50_ms):.1f}",
            "" if is_own else f"{ratio:.2f} ×",
            f"{max(row.foreign_cores):.2f}",
        )
    return table


def latency_table(rows: Sequence[Measured]) -> Table:
    table = make_table("One input of 16 tokens at a time", "contender", "p50 ms", "ratio")
    for row in rows:
        ratio = rows[0].request_p50_ms[0] / row.request_p50_ms[0]
        table.add_row(row.contender, f"{row.request_p50_ms[0]:.2f}", f"{ratio:.2f} ×" if row is not rows[0] else "")
    return table
