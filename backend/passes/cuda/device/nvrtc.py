"""Compiles kernels with NVRTC alone, for GPUs that need not be present, and parses the report of ptxas.

The library comes from the wheel nvidia-cuda-nvrtc, from conda, or from a CUDA toolkit. Several threads can compile at
once; calls release the GIL.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR, Kernel, KernelFailed, group_by_module

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
"""`penstock gpu-check --compile-only` compiles every kernel for all of these. sm_90a: sm_90 with wgmma."""

SHARED_BYTES_LIMIT = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10}
"""Limit per block, static and dynamic together."""

OPTIONS = ("--std=c++17", "-ftz=true", "--ptxas-options=-v")
"""Every kernel is compiled with them. The last one makes ptxas print its report."""

# Beside a GPU it keeps machine code in the driver's cache, and a module from there comes without ptxas' report.
# Source: the NVRTC user guide, "Caching (CUDA 12.9+)".
_CACHES_SINCE = (12, 9)

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '\w+'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The resources of one kernel on one architecture, for example "sm_90a"."""

    kernel: Kernel
    arch: str
    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Bytes per thread of spill stores, spill loads and stack frame."""
    shared_bytes: int
    """Static shared memory per block; `Kernel.shared_bytes` adds to it."""
    cubin: bytes
    """Machine code of this kernel, and of those compiled with it."""
    log: str


def architecture(compute_capability: tuple[int, int]) -> str:
    """Return the name of the architecture to compile for: a device of (8, 9) has sm_89; one of (9, 0) has sm_90a."""
    name = "sm_{}{}".format(*compute_capability)
    return f"{name}a" if compute_capability == (9, 0) else name


def compiles_for(kernel: Kernel, arch: str) -> bool:
    """Whether the architecture has the kernel's instructions."""
    return arch == "sm_90a" or not kernel.needs_wgmma


def compile_module(kernels: Sequence[Kernel], arch: str) -> bytes:
    """Return the machine code of kernels of one source with the same macros.

    NVRTC may take it from its own cache. Raises KernelFailed with the compiler's errors, or if NVRTC is not installed.
    """
    return _compile_source(kernels, arch)[0]


def compile_kernel(kernel: Kernel, arch: str) -> CompileReport:
    """Raises KernelFailed with the compiler's errors, or if NVRTC is not installed."""
    (report,) = _make_reports((kernel,), arch)
    return report


def compile_kernels(kernels: Iterable[Kernel], arch: str, num_threads: int = 1) -> list[CompileReport]:
    """Compile each kernel as `compile_kernel` does, but kernels of one source with the same macros together."""
    with ThreadPoolExecutor(num_threads) as pool:
        reports = pool.map(lambda group: _make_reports(group, arch), group_by_module(kernels))
        return [report for group in reports for report in group]


def _make_reports(kernels: Sequence[Kernel], arch: str) -> list[CompileReport]:
    is_cached = tuple(int(number) for number in version().split(".")) >= _CACHES_SINCE
    cubin, log = _compile_source(kernels, arch, ("--no-cache",) if is_cached else ())
    entries = dict(_ENTRY.findall(log))
    return [_report(kernel, arch, entries, cubin, log) for kernel in kernels]


def _compile_source(kernels: Sequence[Kernel], arch: str, more_options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile kernels of one source with the same macros. Returns the machine code and the compiler's log."""
    source, macros = kernels[0].source, kernels[0].macros
    options = (*OPTIONS, f"-I{KERNELS_DIR}", f"-arch={arch}", *(f"-D{name}={value}" for name, value in macros))
    try:
        # Name the encoding, because NVRTC 12 leaves its thread with an ASCII locale.
        return _compile((KERNELS_DIR / source).read_text("utf-8"), source, (*options, *more_options))
    except (OSError, NvrtcError) as error:
        raise KernelFailed(f"{kernels[0]} of {source} for {arch}: {error}") from error


def _report(kernel: Kernel, arch: str, entries: dict[str, str], cubin: bytes, log: str) -> CompileReport:
    if kernel.entry not in entries:
        raise KernelFailed(f"{kernel}: {kernel.source} has no such kernel for {arch}")
    entry_log = entries[kernel.entry]

    def number(pattern: str) -> int:
        found = re.search(pattern, entry_log)
        return int(found[1]) if found else 0

    spills = (r"(\d+) bytes stack frame", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    return CompileReport(
        kernel,
        arch,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=sum(map(number, spills)),
        shared_bytes=number(r"(\d+) bytes smem"),
        cubin=cubin,
        log=log,
    )


def version() -> str:
    """Return NVRTC's version, for example "13.0". Raises KernelFailed if it is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    except NvrtcError as error:
        raise KernelFailed(str(error)) from error
    return f"{major.value}.{minor.value}"


class NvrtcError(Exception):
    """An error that NVRTC reported, or the reason why NVRTC cannot be loaded."""


def _compile(text: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Return the machine code and the compiler's log. Raises NvrtcError."""
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = library.nvrtcCompileProgram(program, len(options), encoded)
        size = ctypes.c_size_t()
        _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetProgramLog(program, log))
        text_log = log.value.decode(errors="replace")
        if result != 0:
            raise NvrtcError(text_log.strip() or _error_name(result))
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw, text_log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(result: int) -> None:
    if result != 0:
        raise NvrtcError(_error_name(result))


def _error_name(result: int) -> str:
    return str(_library().nvrtcGetErrorString(result).decode())


@cache
def _library() -> ctypes.CDLL:
    """Raises NvrtcError."""
    wheels = (pattern for path in sys.path for pattern in sorted(Path(path, "nvidia").glob("*/lib")))
    toolkits = (Path(root, "lib64") for root in (os.environ.get("CUDA_PATH", ""), "/usr/local/cuda") if root)
    for directory in (*wheels, Path(sys.prefix, "lib"), *toolkits):
        for path in sorted(directory.glob("libnvrtc.so.*")):
            # NVRTC loads this library by name and looks in system directories only.
            for builtins in sorted(directory.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return _declare(ctypes.CDLL(str(path)))
    name = ctypes.util.find_library("nvrtc")
    if name is None:
        raise NvrtcError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    return _declare(ctypes.CDLL(name))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library
