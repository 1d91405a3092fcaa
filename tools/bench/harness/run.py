"""One run of a measurement: its progress, and the report at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.backend.errors import StartupError
from penstock.process.failure import fail
from penstock.serve.options import ServeOptions
from penstock.tools.bench.errors import COMMAND, BenchError
from penstock.tools.bench.harness.peers import Peer, Probe, peer_server
from penstock.tools.bench.harness.report import BenchReport, check_can_write, make_console
from penstock.tools.bench.harness.server import BenchServer, bench_server, first_api_key
from penstock.tools.bench.harness.server_process import ServerProcess
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.processes import exit_on_sigterm


@dataclass(slots=True)
class MeasurementRun:
    """Collects the results of a measurement. Tables go to standard output, progress to standard error."""

    report: BenchReport
    console: Console
    progress: Console
    exit_status: int = 0
    """Exit status: 1 if a request failed, or if the server still held requests or pages after a storm."""

    def status(self, text: str) -> AbstractContextManager[object]:
        """Show this text while the context lasts."""
        return self.progress.status(text)

    @contextmanager
    def server(self, options: ServeOptions) -> Iterator[BenchServer]:
        """A server of our own while the context lasts. Raises BenchError."""
        with ExitStack() as stack:
            with self.status("starting penstock serve"):
                server = stack.enter_context(bench_server(options))
            yield server

    @contextmanager
    def peer(self, peer: Peer, probe: Probe) -> Iterator[ServerProcess]:
        """Another server while the context lasts. Raises BenchError."""
        with ExitStack() as stack:
            with self.status(f"starting {peer.name}"):
                process = stack.enter_context(peer_server(peer, probe))
            yield process

    @contextmanager
    def server_under_test(self, url: str | None, options: ServeOptions) -> Iterator[ServerAddress]:
        """The server at url, or one of our own if url is None. Raises BenchError."""
        if url is not None:
            yield ServerAddress(url, first_api_key(options), options.model)
        else:
            with self.server(options) as server:
                yield server.address

    def add(self, section: str, found: Any, table: Table, aims: Sequence[Aim] = ()) -> None:
        """Print the table now; keep the rest for the report."""
        self.report.sections[section] = found
        self.report.aims += aims
        self.console.print(table)


@contextmanager
def measurement_run(json: Path | None) -> Iterator[MeasurementRun]:
    """Print the report at the end, and write it to json if given.

    A BenchError or StartupError inside the context ends the process with one line and exit status 1.
    """
    exit_on_sigterm()
    run = MeasurementRun(BenchReport(["penstock", *sys.argv[1:]]), make_console(), Console(stderr=True))
    try:
        if json is not None:
            check_can_write(json)
        yield run
        run.report.print(run.console)
        if json is not None:
            run.report.write_json(json)
    except (BenchError, StartupError) as error:
        fail(COMMAND, str(error))
