"""Checks that every kernel compiles without spills: for this GPU, or without one for every supported architecture.

Without a GPU the cubins are written to $PENSTOCK_CUBINS, for a later run elsewhere.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.cubin_cache import cubin_name, write_cubin
from penstock.backend.passes.cuda.device.cupy_launcher import CupyLauncher
from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed, group_by_module
from penstock.process.cache_directory import CUBINS_VARIABLE
from penstock.tools.gpu.cases import ptx_wrappers as wrappers
from penstock.tools.gpu.cases.attention import choices
from penstock.tools.gpu.results import Results

_MAX_WORKERS = 12
_REGISTERS_OF_A_MULTIPROCESSOR = 65_536


def run(results: Results) -> None:
    kernels = all_kernels()
    if has_gpu():
        import torch

        largest = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
        arch = nvrtc.architecture(torch.cuda.get_device_capability(0))
        kernels = [kernel for kernel in kernels if nvrtc.compiles_for(kernel, arch)]
        kernels = [kernel for kernel in kernels if kernel.shared_bytes < largest]  # others have larger rings
        results.attempt("compile.load", lambda: load_all(results, CupyLauncher(0), kernels))
        return
    num_workers, directory = min(os.cpu_count() or 1, _MAX_WORKERS), os.environ.get(CUBINS_VARIABLE)
    compile_for(results, kernels, nvrtc.ARCHITECTURES, num_workers, Path(directory) if directory else None)


def all_kernels() -> list[Kernel]:
    """The kernels of the passes and of the checks."""
    of_checks = (wrappers.wrapper_kernel("multiply", half=half) for half in (0, 1))
    return list(dict.fromkeys([*kernel_manifest.kernels(), *choices.kernels(), *of_checks]))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def compile_for(
    results: Results, kernels: Sequence[Kernel], architectures: Sequence[str], num_workers: int, cubins: Path | None
) -> None:
    """Compile for each architecture; write the cubins if a directory is given."""
    results.fact("compile.nvrtc", nvrtc.version())
    for arch in architectures:
        started_s = time.monotonic()
        compiled = [kernel for kernel in kernels if nvrtc.compiles_for(kernel, arch)]
        reports = nvrtc.compile_kernels(compiled, arch, num_workers)
        results.fact(f"compile.{arch}.kernels", len(reports))
        results.fact(f"compile.{arch}.wall", time.monotonic() - started_s, "s")
        by_kernel = {report.kernel: report for report in reports}
        if cubins is not None:
            cubins.mkdir(parents=True, exist_ok=True)
            for group in group_by_module(compiled):
                write_cubin(cubins / cubin_name(group, arch), by_kernel[group[0]].cubin)
        spilling = [str(report.kernel) for report in reports if report.spill_bytes]
        _check(results, f"compile.{arch}", {report.kernel: report.registers for report in reports}, spilling)


def _check(results: Results, name: str, registers: dict[Kernel, int], spilling: list[str]) -> None:
    results.check(f"{name}.no_spills", not spilling, ", ".join(spilling))
    too_wide = [
        f"{kernel}: {count} registers"
        for kernel, count in registers.items()
        if count * kernel.num_threads > _REGISTERS_OF_A_MULTIPROCESSOR
    ]
    results.check(f"{name}.fits", not too_wide, ", ".join(too_wide))
    by_entry: defaultdict[str, list[int]] = defaultdict(list)
    for kernel, count in registers.items():
        by_entry[kernel.entry].append(count)
    shown = ", ".join(f"{entry} {min(counts)}–{max(counts)}" for entry, counts in sorted(by_entry.items()))
    results.fact(f"{name}.registers", shown)


def load_all(results: Results, launcher: CupyLauncher, kernels: Sequence[Kernel]) -> None:
    """Load the kernels as the backend does at its start. Later sections find those compiled here in the cache."""
    started_s = time.monotonic()
    try:
        launcher.prepare(kernels)
    except KernelFailed:
        for kernel in kernels:
            results.attempt(f"compile.load.{kernel}", partial(launcher.prepare, [kernel]))
        raise
    results.check("compile.load", True, "", len(kernels))
    results.fact("compile.load.wall", time.monotonic() - started_s, "s")
    results.fact("compile.load.compiled", launcher.cubins.num_compiled, "", "modules that were not in the cache")
    loaded = launcher.resources
    spilling = [str(kernel) for kernel in kernels if loaded[kernel].local_bytes]
    registers = {kernel: loaded[kernel].registers for kernel in kernels}
    _check(results, f"compile.{launcher.cubins.arch}", registers, spilling)
