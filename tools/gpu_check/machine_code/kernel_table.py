"""The static table: what each kernel's machine code needs and does, one row per kernel.

`python3 -m penstock.tools.gpu_check.machine_code.kernel_table --kernels decode_attention` prints rows, without a GPU.
`--save` writes docs/gpu/kernels-sm_90a.tsv, whose bounds a test holds.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backend.passes.decoder.cuda import kernel_manifest
from penstock.backend.passes.decoder.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.decoder.cuda.device import nvrtc
from penstock.backend.passes.decoder.cuda.device.launcher import group_by_module
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO, CacheLayout
from penstock.tools.gpu_check.machine_code.occupancy import SHARED_BYTES_PER_SM, blocks_per_sm
from penstock.tools.gpu_check.machine_code.sass import count_names, disassemble

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backend.passes.decoder.cuda.device.launcher import Kernel
    from penstock.backend.passes.decoder.cuda.device.nvrtc import CompileReport
    from penstock.tools.gpu_check.machine_code.sass import Function, Instruction

HELD_ARCH = "sm_90a"
TABLE = Path(__file__).resolve().parents[3] / "docs" / "gpu" / f"kernels-{HELD_ARCH}.tsv"
HELD_MACROS = {"HEAD_DIM": 128, "ACT": 1}
"""The table holds kernels with these macros, or without them: heads of 128 and bf16 activations."""
MATRIX = ("HMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA")
_LOCAL = ("LDL", "STL")
_LOADS = ("LDG",)
_COPIES = ("LDGSTS", "UBLKCP", "UTMALDG")
_INDIRECT = ("BRX", "JMX")
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A tile is one turn of the loop with the most matrix instructions, or without any, with the most loads."""

    kernel: str
    threads: int
    registers: int
    spill_bytes: int
    local_accesses: int
    """Instructions that read or write local memory."""
    shared_bytes: int
    """Static and dynamic, per block."""
    blocks_per_sm: int
    instructions: int
    tile_instructions: int
    """Issued by a warp for a tile, on the longest way through the loop; 0 without a loop."""
    tile_matrix: int
    """Of these, matrix instructions, such as HMMA, HGMMA and QGMMA."""
    tile_copies: int
    """Of these, asynchronous copies to shared memory."""
    tile_indirect: int
    """Of these, indirect jumps."""
    matrix: str
    """Kinds of matrix instructions in the whole kernel, such as "HMMA 160"."""
    loads_in_flight: int
    """Most loads of a thread from global memory before the first of their values is used."""


_COLUMNS = tuple(field.name for field in fields(KernelRow))
_TEXTS = ("kernel", "matrix")


def make_rows(reports: Sequence[CompileReport]) -> list[KernelRow]:
    """Rows of kernels that were compiled together. Raises DisassemblerMissing."""
    functions = disassemble(reports[0].cubin)
    return [make_row(report, functions[report.kernel.entry]) for report in reports]


def make_row(report: CompileReport, function: Function) -> KernelRow:
    kernel = as_launched(report.kernel, report.arch)
    shared_bytes = kernel.shared_bytes + report.shared_bytes
    whole = count_names(function.instructions)
    loop = function.loop_of(*MATRIX) or function.loop_of(*_LOADS, *_COPIES)
    tile = count_names(loop.path) if loop else whole - whole
    kinds = ", ".join(f"{name} {whole[name]}" for name in MATRIX if whole[name])
    return KernelRow(
        kernel=str(report.kernel),
        threads=kernel.num_threads,
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        local_accesses=sum(whole[name] for name in _LOCAL),
        shared_bytes=shared_bytes,
        blocks_per_sm=blocks_per_sm(report.arch, kernel.num_threads, report.registers, shared_bytes),
        instructions=len(function.instructions),
        tile_instructions=tile.total(),
        tile_matrix=sum(tile[name] for name in MATRIX),
        tile_copies=sum(tile[name] for name in _COPIES),
        tile_indirect=sum(tile[name] for name in _INDIRECT),
        matrix=kinds or "none",
        loads_in_flight=loads_in_flight(function.instructions),
    )


def as_launched(kernel: Kernel, arch: str) -> Kernel:
    """The kernel with the shared memory that it is launched with: rings of decode attention fill the multiprocessor."""
    macros = dict(kernel.macros)
    if kernel.entry != "decode_attention":
        return kernel
    kv_dtype = next(name for name, value in KV_MACRO.items() if value == macros["KV_DTYPE"])
    layout = CacheLayout(1, 1, 32, 8, macros["HEAD_DIM"], kv_dtype)
    attention = DecodeAttention(
        layout, 32, 1.0, max_rows=1, max_context_tokens=1 << 17, num_sms=132,
        shared_bytes_per_sm=SHARED_BYTES_PER_SM[arch],
    )  # fmt: skip
    return replace(kernel, shared_bytes=attention.kernel.shared_bytes)


def loads_in_flight(instructions: Iterable[Instruction]) -> int:
    """Most loads from global memory between a load and the first use of a pending one's register, in the order of the
    code. Loads return in order, so a use waits for all loads up to its own."""
    pending: list[int] = []
    most = 0
    for instruction in instructions:
        named = [int(number) for number in _REGISTER.findall(instruction.operands)]
        used = [place for place, register in enumerate(pending) if register in named]
        if used:
            del pending[: max(used) + 1]
        if instruction.name in _LOADS and named:
            pending.append(named[0])
            most = max(most, len(pending))
    return most


def worse_in(held: KernelRow, now: KernelRow) -> list[str]:
    """What is worse than in the held row; more instructions by up to 2 % are the same."""
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


def held_groups() -> list[list[Kernel]]:
    """The kernels of the table, by module."""
    return [
        group
        for group in group_by_module(kernel_manifest.kernels())
        if all(dict(group[0].macros).get(name, value) == value for name, value in HELD_MACROS.items())
    ]


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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("kernel_table", description=__doc__)
    parser.add_argument(
        "--kernels", default="", help="only kernels whose name contains this; default: all of the table"
    )
    parser.add_argument("--all", action="store_true", help="every instantiation, not only those of the table")
    parser.add_argument("--arch", default=HELD_ARCH, choices=nvrtc.ARCHITECTURES)
    parser.add_argument("--save", action="store_true", help=f"replace these kernels' rows in {TABLE.name}")
    options = parser.parse_args(argv)
    if options.save and (options.arch != HELD_ARCH or options.all):
        parser.error(f"--save needs the table's own kernels on {HELD_ARCH}")
    groups = group_by_module(kernel_manifest.kernels()) if options.all else held_groups()
    chosen = [group for group in groups if any(options.kernels in str(kernel) for kernel in group)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda group: make_rows(nvrtc.compile_kernels(group, options.arch)), chosen)
        rows = [row for group in compiled for row in group]
    print("\n".join(table_lines(rows)))
    if options.save:
        listed = [str(kernel) for group in groups for kernel in group]
        before = read_table() if TABLE.exists() else {}
        known = before | {row.kernel: row for row in rows}
        write_table([known[name] for name in listed if name in known])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
