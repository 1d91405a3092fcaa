"""`penstock bench routers`: proxies before the same servers, with prompts in groups that begin alike. Needs no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.process.supervisor import module_argv
from penstock.serve.fleet.router import Router, RouterSettings
from penstock.serve.fleet.servers import Server
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.processes import tree_cpu_s
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.harness.server_process import ServerProcess, server_process
from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HttpClient, HttpReply
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, ReportOptions
from penstock.tools.free_port import free_port

if TYPE_CHECKING:
    from rich.table import Table

_START_TIMEOUT_S = 120.0
_READY = re.compile(r"Ready: http://\S+:(\d+)/v1")
_ROUND_ROBIN = """global
    hard-stop-after 1s
    description {{ generation }}
    stats socket {{ directory }}/haproxy.sock mode 600 level admin expose-fd listeners
defaults
    mode http
    timeout connect 2s
    timeout client 1h
    timeout server 1h
    option http-server-close
listen all
    bind {{ listen }}
    balance roundrobin
{%- for server in servers %}
    server {{ server.name }} {{ server.address }}
{%- endfor %}
"""


@MEASUREMENT
@dataclass(frozen=True)
class RouterOptions:
    servers: Annotated[int, Parameter(validator=Number(gte=2, lte=64))] = 3
    """Servers behind each router."""

    groups: AtLeastOne = 8
    """Groups of prompts that begin alike. Each router gets groups of its own, so none finds another's pages."""

    requests: AtLeastOne = 240
    """Requests over all groups, in random order."""

    clients: AtLeastOne = 12
    """Clients, each of which sends its next request when it has its answer."""

    prefix_words: AtLeastOne = 400
    """Words that the prompts of a group have in common."""

    sequential: AtLeastOne = 1000
    """Requests of a single client, one after the other, for what a hop adds."""

    stream_tokens: AtLeastOne = 20_000
    """Tokens of the stream for a hop's cost of an event."""

    also: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)] = ()
    """NAME=COMMAND of another router, with {port} and {urls}, such as "vllm-router=vllm-router --port {port}
    --worker-urls {urls} --policy cache_aware"; may be repeated."""

    serve: Annotated[str, Parameter(allow_leading_hyphen=True)] = "--forward-pass fake --kv-budget 256MB --gpu none"
    """Options of each `penstock serve`."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The result of one router."""

    router: str
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens computed in all servers."""
    busiest: float
    """Prompt tokens of the busiest server over the mean."""
    request_ms: float
    """Median request time of the single client."""
    request_cpu_us: float
    """CPU time of the router's processes."""
    event_cpu_us: float


@dataclass(frozen=True, slots=True)
class _Way:
    """A route to the servers."""

    name: str
    url: str
    pid: int | None
    """The router's; None without one."""

    def cpu_s(self) -> float:
        return 0.0 if self.pid is None else tree_cpu_s(self.pid)


def routers(
    *,
    options: RouterOptions = RouterOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run, contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-routers-")))
        servers = [stack.enter_context(_server(number, options.serve)) for number in range(options.servers)]
        found = []
        for number, way in enumerate(_ways(servers, options, directory)):
            with way as entered, run.status(entered.name):
                found.append(uvloop.run(_measure(entered, servers, options, number)))
        run.add("routers", found, routers_table(found, options))
    return run.exit_status


@contextlib.contextmanager
def _server(number: int, options: str) -> Iterator[Server]:
    argv = module_argv("penstock.main", ["serve", "--port", "0", *shlex.split(options)])
    with server_process(f"server {number}", argv, os.environ) as process:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (found := _READY.search(process.log_text())) is None:
            process.check_alive("during its start")
            if time.monotonic() > deadline_s:
                raise BenchError(f"server {number} was not ready after {_START_TIMEOUT_S:g} s")
            time.sleep(0.05)
        yield Server(number, "127.0.0.1", int(found[1]))


def _ways(
    servers: Sequence[Server], options: RouterOptions, directory: Path
) -> Iterator[contextlib.AbstractContextManager[_Way]]:
    """All routes: all servers behind each router; first one server alone, the best possible case."""
    yield contextlib.nullcontext(_Way("one server, no router", f"http://{servers[0].address}", None))
    template = directory / "round-robin"
    template.write_text(_ROUND_ROBIN)
    round_robin = RouterSettings("haproxy", directory / "round", f"127.0.0.1:{free_port()}", template)
    yield _shipped("HAProxy, round robin", round_robin, servers)
    yield _shipped("HAProxy", RouterSettings("haproxy", directory / "haproxy", f"127.0.0.1:{free_port()}"), servers)
    yield _shipped("nginx", RouterSettings("nginx", directory / "nginx", f"127.0.0.1:{free_port()}"), servers)
    for text in options.also:
        name, equals, command = text.partition("=")
        if not equals:
            raise BenchError(f'--also is "{text}"; write NAME=COMMAND')
        yield _foreign(name, command, servers)


@contextlib.contextmanager
def _shipped(name: str, settings: RouterSettings, servers: Sequence[Server]) -> Iterator[_Way]:
    router = Router(settings)
    router.apply(servers)
    try:
        yield _Way(name, f"http://{settings.listen}", router.pid)
    finally:
        router.stop()


@contextlib.contextmanager
def _foreign(name: str, command: str, servers: Sequence[Server]) -> Iterator[_Way]:
    port = free_port()
    urls = [f"http://{server.address}" for server in servers]
    argv = [
        part
        for word in shlex.split(command)
        for part in (urls if word == "{urls}" else [word.replace("{port}", str(port))])
    ]
    with server_process(name, argv, os.environ) as process:
        way = _Way(name, f"http://127.0.0.1:{port}", process.pid)
        uvloop.run(_wait_for(way, process))
        yield way


async def _wait_for(way: _Way, process: ServerProcess) -> None:
    """Raises BenchError."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        process.check_alive("during its start")
        with contextlib.suppress(ConnectionBroken, BenchError):
            await _complete(HttpClient(way.url), "Are you there?", 1)
            return
        if time.monotonic() > deadline_s:
            raise BenchError(f"{way.name} did not answer within {_START_TIMEOUT_S:g} s\n{process.log_tail()}")
        await asyncio.sleep(0.2)


async def _measure(way: _Way, servers: Sequence[Server], options: RouterOptions, number: int) -> Routed:
    drawn = random.Random(number)  # noqa: S311 - prompts, not secrets
    prefixes = [_words(drawn, options.prefix_words) for _ in range(options.groups)]
    prompts = [f"{prefixes[each % options.groups]} {_words(drawn, 20)}" for each in range(options.requests)]
    drawn.shuffle(prompts)
    before = [await _tokens(server) for server in servers]
    remaining = iter(prompts)

    async def client() -> None:
        http = HttpClient(way.url)
        for prompt in remaining:
            await _complete(http, prompt, 8)
        http.close()

    await asyncio.gather(*(client() for _ in range(options.clients)))
    after = [await _tokens(server) for server in servers]
    shares = [now[0] - then[0] for then, now in zip(before, after, strict=True)]
    computed = sum(now[1] - then[1] for then, now in zip(before, after, strict=True))
    request_ms, request_cpu_us = await _time_requests(way, options.sequential)
    event_cpu_us = await _time_events(way, options.stream_tokens)
    busiest = max(shares) / (sum(shares) / len(shares)) if way.pid is not None else 1.0
    return Routed(way.name, sum(shares), computed, busiest, request_ms, request_cpu_us, event_cpu_us)


async def _time_requests(way: _Way, count: int) -> tuple[float, float]:
    """Return the median milliseconds of one request after the other, and the router's CPU microseconds of each."""
    http, times_s = HttpClient(way.url), []
    cpu_s = way.cpu_s()
    for _ in range(count):
        begun_s = time.perf_counter()
        await _complete(http, "Once upon a time", 1)
        times_s.append(time.perf_counter() - begun_s)
    http.close()
    return 1e3 * statistics.median(times_s), 1e6 * (way.cpu_s() - cpu_s) / count


async def _time_events(way: _Way, count: int) -> float:
    """Return the router's CPU microseconds of one event of a stream."""
    http, cpu_s = HttpClient(way.url), way.cpu_s()
    num_events = 0

    def take(_arrived_s: float, _payload: bytes) -> None:
        nonlocal num_events
        num_events += 1

    body = {"prompt": "Once upon a time", "max_tokens": count, "ignore_eos": True, "stream": True}
    request = http.encode_post("/v1/completions", msgspec.json.encode(body | {"model": "penstock-demo"}))
    _check(await http.ask(lambda connection: connection.exchange(request, take)))
    http.close()
    return 1e6 * (way.cpu_s() - cpu_s) / num_events


async def _complete(http: HttpClient, prompt: str, max_tokens: int) -> None:
    """Raises BenchError, ConnectionBroken."""
    body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = http.encode_post("/v1/completions", msgspec.json.encode(body))
    _check(await http.ask(lambda connection: connection.exchange(request)))


def _check(reply: HttpReply) -> None:
    if reply.status != 200:
        raise BenchError(f"status {reply.status}: {reply.body[:200]!r}")


async def _tokens(server: Server) -> tuple[int, int]:
    """Return the prompt tokens that the server has received, and those that it has computed. Raises BenchError."""
    http = HttpClient(f"http://{server.address}")
    page = (await http.get("/metrics")).body.decode()
    http.close()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    prompt, cached = (int(float(values[f"penstock_{name}_tokens_total"])) for name in ("prompt", "cached"))
    return prompt, prompt - cached


def _words(drawn: random.Random, count: int) -> str:
    return " ".join(
        drawn.choices(("river", "stone", "morning", "seven", "under", "blue", "walks", "and", "the"), k=count)
    )


def routers_table(rows: Sequence[Routed], options: RouterOptions) -> Table:
    title = f"{options.requests} requests in {options.groups} groups to {options.servers} servers"
    columns = ("router", "computed / sent", "by one server", "busiest", "request ms")
    table = make_table(title, *columns, "CPU µs a request", "an event")
    for row in rows:
        table.add_row(
            row.router,
            f"{row.computed_tokens:,} / {row.prompt_tokens:,}",
            f"{row.computed_tokens / rows[0].computed_tokens:.2f}",
            f"{row.busiest:.2f}",
            f"{row.request_ms:.2f}",
            f"{row.request_cpu_us:.0f}",
            f"{row.event_cpu_us:.1f}",
        )
    return table
