"""Rows of the table of kernels' machine code, their file, and their comparison."""

from __future__ import annotations

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HELD_ARCH = "sm_90a"
TABLE = Path(__file__).with_name(f"kernels-{HELD_ARCH}.tsv")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel's row. A tile is one turn of the loop with the most matrix instructions; without any, with the most
    loads."""

    kernel: str
    threads: int
    registers: int
    spill_bytes: int
    local_accesses: int
    """Instructions that read or write local memory."""
    shared_bytes: int
    """Static and dynamic shared memory per block."""
    blocks_per_sm: int
    instructions: int
    tile_instructions: int
    """Issued by a warp for a tile, on the longest way through the loop; 0 without a loop."""
    tile_matrix: int
    """Matrix instructions among these, such as HMMA, HGMMA and QGMMA."""
    tile_copies: int
    """Asynchronous copies to shared memory among these."""
    tile_indirect: int
    """Indirect jumps among these."""
    matrix: str
    """Kinds of matrix instructions in the whole kernel, such as "HMMA 160"."""
    loads_in_flight: int
    """Most loads of a thread from global memory before the first of their values is used."""


_COLUMNS = tuple(field.name for field in fields(KernelRow))
_TEXTS = ("kernel", "matrix")


def worse_in(held: KernelRow, now: KernelRow) -> list[str]:
    """The properties that are worse than in the held row; up to 2 % more instructions count as equal."""
    as_many_run = now.blocks_per_sm >= held.blocks_per_sm
    is_worse = {
        "registers": now.registers > held.registers and not as_many_run,
        "spill_bytes": now.spill_bytes > held.spill_bytes,
        "local_accesses": now.local_accesses > held.local_accesses,
        "shared_bytes": now.shared_bytes > held.shared_bytes and not as_many_run,
        "blocks_per_sm": not as_many_run,
        "tile_instructions": now.tile_instructions > held.tile_instructions * 1.02,
        "tile_matrix": now.tile_matrix < held.tile_matrix,
        "tile_indirect": now.tile_indirect > held.tile_indirect,
        "loads_in_flight": now.loads_in_flight < held.loads_in_flight,
    }
    return [f"{name} {getattr(held, name)} → {getattr(now, name)}" for name, worse in is_worse.items() if worse]


def read_table(path: Path = TABLE) -> dict[str, KernelRow]:
    """Rows by kernel. Raises ValueError or KeyError for a file that `write_table` did not write."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [_read_row(line) for line in csv.DictReader(file, delimiter="\t")]
    return {row.kernel: row for row in rows}


def _read_row(line: dict[str, str]) -> KernelRow:
    values: dict[str, Any] = {name: line[name] if name in _TEXTS else int(line[name]) for name in _COLUMNS}
    return KernelRow(**values)


def write_table(rows: Iterable[KernelRow], path: Path = TABLE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(map(astuple, rows))


def table_lines(rows: Sequence[KernelRow]) -> list[str]:
    """The table for the console, with aligned columns."""
    cells = [[name.replace("_", " ") for name in _COLUMNS]]
    cells += [list(map(str, astuple(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
