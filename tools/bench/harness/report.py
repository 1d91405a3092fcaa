"""Tables for people and JSON for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.machine import MachineDescription, this_machine
from penstock.tools.bench.load_generator.stats import Aim, LoadSummary, Spread

MIN_WIDTH = 132
"""Columns of the widest table. A narrower terminal wraps lines instead of cutting figures off."""


def check_can_write(path: Path) -> None:
    """Check before a long run that the report can be written. Changes nothing. Raises BenchError."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> BenchError:
    return BenchError(f"--json {path} cannot be written: {error.strerror}")


def make_console() -> Console:
    return Console(width=max(Console().width, MIN_WIDTH))


@dataclass(slots=True)
class BenchReport:
    """Everything that a run found. sections has plain dataclasses by name, for results that are no row of load."""

    command: Sequence[str]
    machine: MachineDescription = field(default_factory=this_machine)
    rows: list[LoadSummary] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)
    aims: list[Aim] = field(default_factory=list)

    def write_json(self, path: Path) -> None:
        """Raises BenchError."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:
            raise _cannot_write(path, error) from None

    def print(self, console: Console) -> None:
        console.print(self.machine.describe(), style="dim", highlight=False, soft_wrap=True)
        if self.rows:
            console.print(load_table(self.rows))
        for row in self.rows:
            if row.first_error:
                console.print(f"{row.load}: first error: {row.first_error}", style="red", markup=False, soft_wrap=True)
        for aim in self.aims:
            mark, style = ("✓", "green") if aim.reached else ("✗", "red")
            console.print(f"{mark} {aim.name}: {aim.value:.3g} ({aim.direction} {aim.limit:g})", style=style)


def make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def load_table(rows: Sequence[LoadSummary]) -> Table:
    columns = ["load", "re-\nquests", "output\ntok/s", "prompt\ntok/s", "tok/\nevent", "req/s"]
    columns += ["TTFT ms\np50 / p99", "ITL ms\np50 / p99", "e2e ms\np50 / p99"]
    columns += ["drop-\nped", "sent\nagain", "er-\nrors", "generator\nµs/token"]
    table = make_table("", *columns)
    for row in rows:
        table.add_row(
            row.load,
            str(row.requests),
            f"{row.output_tokens_per_s:,.0f}",
            f"{row.prompt_tokens_per_s:,.0f}",
            f"{row.output_tokens / max(row.events, 1):.1f}",
            f"{row.requests_per_s:.2f}",
            _pair(row.ttft_ms),
            _pair(row.itl_ms),
            _pair(row.e2e_ms),
            str(row.dropped),
            str(row.sent_again),
            str(row.failed),
            f"{row.generator_cpu_us_per_token:.0f}",
        )
    return table


def _pair(spread: Spread) -> str:
    return f"{ms(spread.p50)} / {ms(spread.p99)}"


def ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
