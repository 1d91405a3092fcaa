"""The command: options, and the findings as text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from penstock.commands.doctor.addresses import examine_addresses
from penstock.commands.doctor.cpu import examine_cpu
from penstock.commands.doctor.finding import Finding, Level
from penstock.commands.doctor.gpu import examine_cuda, examine_gpu, read_cuda_versions
from penstock.commands.doctor.memory import examine_memory
from penstock.commands.doctor.model import examine_model
from penstock.commands.doctor.software import examine_software
from penstock.commands.doctor.ulimits import examine_ulimits
from penstock.process.options import from_environment
from penstock.process.private_directory import default_socket_path

_WIDTH_WITHOUT_TERMINAL = 200
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options with which the server would be started."""

    model: Annotated[str | None, from_environment("--model")] = None
    """A directory, a GGUF file or a hub id that shall be served too."""
    revision: Annotated[str | None, from_environment("--revision")] = None
    """Branch, tag or commit of a model on the hub."""
    gpu: Annotated[str, from_environment("--gpu")] = "auto"
    """As in `penstock serve`."""
    socket: Annotated[Path, Parameter(show_default=False), from_environment("--socket")] = field(
        default_factory=default_socket_path
    )
    """The backend's Unix socket."""
    host: Annotated[str, from_environment("--host")] = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65_535)), from_environment("--port")] = 8000
    """The port to listen on."""
    quick: Annotated[bool, Parameter(negative="")] = False
    """Do not measure the speed of kernels and memory."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object per finding and line."""


def doctor(*, options: DoctorOptions = DoctorOptions()) -> int:
    """Examine this machine. The exit status is 1 if a finding keeps the server from running, else 0."""
    levels = []
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    for finding in examine(options):
        levels.append(finding.level)
        if options.json:
            print(msgspec.json.encode(asdict(finding)).decode(), flush=True)
        else:
            console.print(_row(finding))
    if not options.json:
        counts = ", ".join(f"{levels.count(level)} {level}" for level in Level if level in levels)
        console.print(f"\n{counts}")
    sys.stdout.flush()
    return int(Level.ERROR in levels)


def examine(options: DoctorOptions) -> Iterator[Finding]:
    """Yield each finding as soon as it is known."""
    yield from examine_software()
    yield from examine_memory()
    yield from examine_ulimits()
    yield from examine_cpu(is_quick=options.quick)
    yield from examine_cuda(options.gpu, read_cuda_versions())
    yield from examine_gpu(options.gpu)
    yield from examine_addresses(options.socket, options.host, options.port)
    if options.model is not None:
        yield from examine_model(options.model, options.revision)


def _row(finding: Finding) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=7, style=_STYLES[finding.level])
    table.add_column(width=18)
    table.add_column(overflow="fold")
    table.add_row(finding.level, finding.subject, finding.found)
    if finding.remedy:
        table.add_row("", "", f"→ {finding.remedy}", style="bold")
    return table
