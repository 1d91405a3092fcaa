"""Servers of other projects, started for a comparison by the command that the user gives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import uvloop

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.server_process import START_TIMEOUT_S, ServerProcess, server_process
from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HttpClient
from penstock.tools.bench.load_generator.sending import send_one
from penstock.tools.bench.load_generator.stats import Outcome
from penstock.tools.bench.load_generator.target import Endpoint, ServerAddress
from penstock.tools.bench.load_generator.workload import PlannedRequest

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: str
    """Program and arguments, quoted as for a shell; NAME=VALUE before the program sets its environment."""
    url: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Return NAME=COMMAND,URL as a peer. Raises BenchError."""
        name, _, rest = text.partition("=")
        command, _, url = rest.rpartition(",")
        try:
            HttpClient(url)
            if not (name and shlex.split(command)):
                raise ValueError("a part is empty")
        except ValueError as error:
            raise BenchError(f'--peer "{text}" is not NAME=COMMAND,URL: {error}') from None
        return cls(name, command, url)


Probe: TypeAlias = Callable[[ServerAddress], Awaitable[str]]
"""Sends one request. Returns why it has no answer yet, or "" when it has one. Raises BenchError."""


def completion_probe(endpoint: Endpoint) -> Probe:
    """Some servers list their model while they still load it, so a completion is asked for."""

    async def ask(address: ServerAddress) -> str:
        async with address.connect(endpoint) as target:
            record = await send_one(target.http, target.encode(PlannedRequest("hello", 1)), time.perf_counter())
        return "" if record.outcome is Outcome.COMPLETED else record.error

    return ask


@contextlib.contextmanager
def peer_server(peer: Peer, probe: Probe) -> Iterator[ServerProcess]:
    """Run the peer while the context lasts, from its first answer on. Raises BenchError."""
    uvloop.run(_check_is_free(peer))
    with server_process(peer.name, ("env", *shlex.split(peer.command)), os.environ) as process:
        uvloop.run(_wait_until_it_answers(process, ServerAddress(peer.url), probe))
        yield process


async def _check_is_free(peer: Peer) -> None:
    """Raises BenchError: another server at this address would be measured in the peer's place."""
    http = HttpClient(peer.url)
    with contextlib.suppress(ConnectionBroken):
        (await http.connect()).close()
        raise BenchError(
            f"{peer.name} cannot start: a server already listens at {peer.url} and would be measured in its "
            "place; stop it first"
        )


async def _wait_until_it_answers(process: ServerProcess, address: ServerAddress, probe: Probe) -> None:
    """Raises BenchError."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        process.check_alive("before it answered")
        try:
            reason = await probe(address)
        except BenchError as error:
            reason = str(error)
        else:
            if not reason:
                return
            if reason.startswith("status 4"):
                raise BenchError(f"{process.name} refuses a request: {reason}")
        if time.monotonic() > deadline_s:
            raise BenchError(f"{process.name} did not answer in {START_TIMEOUT_S:g} s: {reason}\n{process.log_tail()}")
        await asyncio.sleep(_POLL_S)
