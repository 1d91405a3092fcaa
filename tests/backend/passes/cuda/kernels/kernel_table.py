"""The table of machine code: resources and instructions of each kernel, one row per kernel.

Run as a module, `--kernels decode_attention` prints rows, without a GPU; `--save` writes kernels-sm_90a.tsv, whose
bounds a test holds.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import group_by_module
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from tests.backend.passes.cuda.kernels.kernel_rows import (
    HELD_ARCH,
    TABLE,
    KernelRow,
    read_table,
    table_lines,
    write_table,
)
from tests.backend.passes.cuda.kernels.sass import count_names, disassemble

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backend.passes.cuda.device.launcher import Kernel
    from penstock.backend.passes.cuda.device.nvrtc import CompileReport
    from tests.backend.passes.cuda.kernels.sass import Function, Instruction

HELD_MACROS = {"HEAD_DIM": 128, "ACT": 1}
"""The table holds kernels with these macros, or without them: heads of 128 and bf16 activations."""
MATRIX = ("HMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA")
_LOCAL = ("LDL", "STL")
_LOADS = ("LDG",)
_COPIES = ("LDGSTS", "UBLKCP", "UTMALDG")
_INDIRECT = ("BRX", "JMX")
_REGISTER = re.compile(r"\bR(\d+)\b")
SHARED_BYTES_PER_SM = {"sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90a": 228 << 10}
_WARPS_PER_SM = {"sm_80": 64, "sm_89": 48, "sm_90a": 64}
_BLOCKS_PER_SM = {"sm_80": 32, "sm_89": 24, "sm_90a": 32}
_REGISTERS_PER_SM = 65_536
_REGISTERS_UNIT = 256
"""Registers are given to a warp in multiples of this."""
_RESERVED_SHARED_BYTES = 1024
_SHARED_UNIT = 128


def make_rows(reports: Sequence[CompileReport]) -> list[KernelRow]:
    """Rows of kernels that were compiled together. Raises DisassemblerMissing."""
    functions = disassemble(reports[0].cubin)
    return [make_row(report, functions[report.kernel.entry]) for report in reports]


def make_row(report: CompileReport, function: Function) -> KernelRow:
    kernel = report.kernel
    shared_bytes = kernel.shared_bytes + report.shared_bytes
    whole = count_names(function.instructions)
    # Without matrix instructions: the loop of the copies, not one around it that also has those of its start.
    # A loop around that of the tiles also has the first and the last tile's products of a warpgroup.
    loop = (
        function.loop_of("HGMMA", share=0.5)
        or function.loop_of(*MATRIX)
        or function.loop_of(*_COPIES, share=0.5)
        or function.loop_of(*_LOADS)
    )
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


def blocks_per_sm(arch: str, num_threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks a multiprocessor runs at once; 0 if not even one fits.

    Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
    """
    num_warps = -(-num_threads // 32)
    per_warp = -(-registers * 32 // _REGISTERS_UNIT) * _REGISTERS_UNIT
    # Each of the four schedulers has a quarter of the registers, and runs whole warps.
    warps_by_registers = _REGISTERS_PER_SM // 4 // max(per_warp, 1) * 4
    shared = -(-(shared_bytes + _RESERVED_SHARED_BYTES) // _SHARED_UNIT) * _SHARED_UNIT
    return min(
        _BLOCKS_PER_SM[arch],
        _WARPS_PER_SM[arch] // num_warps,
        warps_by_registers // num_warps,
        SHARED_BYTES_PER_SM[arch] // shared,
    )


def is_launched(kernel: Kernel, arch: str) -> bool:
    """Return whether the architecture uses the kernel: rings of decode attention are as large as its shared memory, and
    products of warpgroups need sm_90a."""
    if not nvrtc.compiles_for(kernel, arch):
        return False
    macros = dict(kernel.macros)
    if kernel.entry != "decode_attention":
        return True
    kv_dtype = next(name for name, value in KV_MACRO.items() if value == macros["KV_DTYPE"])
    layout = CacheLayout(1, 1, 32, 8, macros["HEAD_DIM"], kv_dtype)
    attention = DecodeAttention(
        layout, 32, 1.0, max_rows=1, max_context_tokens=1 << 17, num_sms=132,
        shared_bytes_per_sm=SHARED_BYTES_PER_SM[arch],
    )  # fmt: skip
    return kernel == attention.kernel


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


def held_groups() -> list[list[Kernel]]:
    """The kernels of the table, by module."""
    return [
        group
        for group in group_by_module(kernel_manifest.kernels())
        if is_launched(group[0], HELD_ARCH)
        and all(dict(group[0].macros).get(name, value) == value for name, value in HELD_MACROS.items())
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
