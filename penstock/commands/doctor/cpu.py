"""The CPU: its cores, the path of its kernels, and their speed beside that of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.library.cpu_paths import (
    CpuInfo,
    CpuPath,
    machine_paths,
    read_cpu_info,
    supported_paths,
)
from penstock.backend.passes.cpu.library.native_library import LibraryUnavailableError, find_compiler
from penstock.backend.passes.cpu.library.thread_counts import num_usable_cores
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.cpu.path_choice import NativeKernels, open_fastest
from penstock.backend.passes.cpu.path_timing import TIMED_ROWS, product_config, timed_products
from penstock.commands.doctor.finding import Finding, Level

_HIDDEN_SIZE = 2048
_NUM_HEADS = 1024
"""A product of 2,048 inputs and 131,072 outputs: 537 MB of bf16, more than the caches of most CPUs hold."""
_READ_BYTES = 512
"""`WeightPacker.read_memory` reads multiples of this."""
_TURNS = 5
_SLOW_SHARE = 0.7
"""Below this share of the memory's speed a product of one row is limited by something else."""


def examine_cpu(*, is_quick: bool) -> Iterator[Finding]:
    """Without is_quick the kernels are timed, which needs 1.2 GB of memory for some seconds."""
    yield cores(num_usable_cores())
    cpu = read_cpu_info()
    yield features(cpu, machine_paths())
    try:
        kernels = open_fastest(cpu)
    except LibraryUnavailableError as error:
        yield without_kernels(str(error), find_compiler())
        return
    yield compiler(find_compiler())
    others = ", ".join(path.name for path in supported_paths(cpu) if path != kernels.path)
    chosen = f"path {kernels.path.name}{f', also possible: {others}' if others else ''}"
    yield Finding(Level.OK, "CPU kernels", chosen)
    if not is_quick:
        yield bandwidth(*measure_bandwidth(kernels, num_usable_cores()), num_usable_cores())


def cores(count: int) -> Finding:
    if count == 1:
        return Finding(
            Level.WARNING,
            "cores",
            "this process may use one core",
            "give it two or more: the HTTP processes and the backend otherwise wait for each other",
        )
    return Finding(Level.OK, "cores", f"this process may use {count}")


def features(cpu: CpuInfo, paths: Sequence[CpuPath]) -> Finding:
    """Report on the CPU's features.

    paths are those of this architecture, best first. Features that the best one needs and the CPU lacks are named.
    """
    subject = "CPU features"
    known = sorted(frozenset[str]().union(*(path.cpu_flags for path in paths)) & cpu.flags)
    if not any(path.cpu_flags <= cpu.flags for path in paths):
        remedy = "take a CPU with AVX2 and FMA, or any of ARM's 64-bit CPUs; a virtual machine may hide its features"
        return Finding(Level.WARNING, subject, f"not enough for our kernels: {', '.join(known) or 'none'}", remedy)
    best = paths[0]
    missing = ", ".join(sorted(best.cpu_flags - cpu.flags))
    return Finding(
        Level.OK, subject, ", ".join(known) + (f"; path {best.name} would need {missing}" if missing else "")
    )


def compiler(path: str | None) -> Finding:
    """For a machine whose kernels are compiled already."""
    if path is None:
        remedy = "apt-get install g++, before an update compiles its kernels"
        return Finding(Level.NOTE, "C++ compiler", "none; the kernels that are used were compiled before", remedy)
    return Finding(Level.OK, "C++ compiler", path)


def without_kernels(reason: str, compiler: str | None) -> Finding:
    remedy = "apt-get install g++, or set CXX to a C++ compiler" if compiler is None else "see the reason"
    return Finding(Level.WARNING, "CPU kernels", f"none, so torch computes, several times slower: {reason}", remedy)


def measure_bandwidth(kernels: NativeKernels, num_threads: int) -> tuple[float, float]:
    """Return bytes per second of a bf16 product of one row, and of reading its weights with the same threads."""
    config = product_config(_HIDDEN_SIZE, _NUM_HEADS)
    with torch.inference_mode():
        uses_tiles = kernels.path.uses_tiles
        ops = NativeOps(
            kernels.library, config, Dtype.BF16, max(TIMED_ROWS), num_threads, spin_s=0.0, uses_tiles=uses_tiles
        )
        try:
            multiply = timed_products(ops, config)[0]
            memory = [part[: len(part) // _READ_BYTES * _READ_BYTES].view(np.float32) for part in ops.weights.memory()]
            num_bytes = sum(part.nbytes for part in memory)

            def read() -> None:
                for part in memory:
                    ops.weights.read_memory(part)

            product_s, read_s = _least_seconds((multiply, read), _TURNS)
            return ops.weights.linear_bytes / product_s, num_bytes / read_s
        finally:
            ops.close()


def bandwidth(product: float, reading: float, num_threads: int) -> Finding:
    """Both in bytes per second."""
    found = (
        f"a product of one row reads its weights at {product / 1e9:.1f} GB/s, and memory gives "
        f"{reading / 1e9:.1f} GB/s to {num_threads} threads"
    )
    if product < _SLOW_SHARE * reading:
        return Finding(
            Level.WARNING,
            "kernel speed",
            found,
            "other programs may use the cores now: run it again on an idle machine, or give fewer threads to others",
        )
    return Finding(Level.OK, "kernel speed", found)


def _least_seconds(functions: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Return the least time of each function. They take turns, so that other load meets all of them alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(turns):
        for function, taken in zip(functions, times, strict=True):
            started_s = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started_s)
    return [min(taken) for taken in times]
