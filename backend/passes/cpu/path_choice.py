"""Chooses the path of the native CPU kernels at start, and opens its library.

The best path that the CPU supports is used. Where another may be faster on some CPUs (`CpuPath.rival`) both are timed
once, and the result is kept in the user's cache: later starts take the same path, so a request keeps its tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from penstock.backend.errors import StartupError
from penstock.backend.passes.cpu.library.cpu_paths import (
    CpuInfo,
    CpuPath,
    KernelBuild,
    machine_builds,
    machine_paths,
    read_cpu_info,
    supported_paths,
)
from penstock.backend.passes.cpu.library.native_library import (
    LibraryUnavailableError,
    directory_name,
    open_build,
    request_tiles,
)
from penstock.backend.passes.cpu.library.native_structs import Shape, declare_functions
from penstock.backend.passes.cpu.library.thread_counts import num_usable_cores
from penstock.backend.passes.cpu.native_sampling import NativeSampler
from penstock.backend.passes.cpu.path_timing import TIMED_ROWS, time_products
from penstock.process.cache_directory import cache_directory, check_cached_file
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.backend")

AUTO = "auto"

_FAST_BF16_PATHS = ("amx", "avx512_bf16", "neon_bf16")
"""Paths whose products of bf16 are instructions of their own."""
_RIVAL_GAIN = 0.9
"""A rival is chosen if it needs less than this share of the other path's time, on average over TIMED_ROWS.

Paths of about equal speed must not change places from one measurement to the next.
"""
_MAX_RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NativeKernels:
    path: CpuPath
    library: ctypes.CDLL


@dataclass(frozen=True, slots=True)
class _Record:
    """The file that keeps a choice between two paths."""

    path: str
    milliseconds: dict[str, tuple[float, ...]]

    def encode(self) -> str:
        return json.dumps({"path": self.path, "milliseconds": self.milliseconds}, separators=(",", ":"))

    @classmethod
    def decode(cls, text: bytes) -> _Record:
        """Raises ValueError for anything that `encode` does not write."""
        match json.loads(text):
            case {"path": str(path), "milliseconds": dict(times), **others} if not others:
                return cls(path, {str(name): tuple(map(float, each)) for name, each in times.items()})
        raise ValueError("not a record of path times")


def check_cpu_path(name: str) -> None:
    """Raise StartupError unless name is "auto" or a path that this machine's CPU supports."""
    if name == AUTO:
        return
    if name not in (path.name for path in machine_paths()):
        names = ", ".join((AUTO, *(path.name for path in machine_paths())))
        raise StartupError(
            f"--cpu-path is {name}, which this machine's architecture does not have: choose from {names}"
        )
    supported = supported_paths(read_cpu_info())
    if name not in (path.name for path in supported):
        names = ", ".join((AUTO, *(path.name for path in supported)))
        raise StartupError(f"--cpu-path is {name}, which this CPU does not support: choose from {names}")


def multiplies_bf16(cpu_path: str) -> bool:
    """The path has instructions for products of bf16. Raises StartupError if it cannot be used."""
    check_cpu_path(cpu_path)
    fastest = next(iter(supported_paths(read_cpu_info())), None)
    name = "" if fastest is None else fastest.name
    return (name if cpu_path == AUTO else cpu_path) in _FAST_BF16_PATHS


@cache
def load_kernels(cpu_path: str = AUTO) -> NativeKernels | None:
    """Return the kernels of a path, by default the fastest; None if there are none, which is logged.

    Raises StartupError if the path that was asked for cannot be used.
    """
    check_cpu_path(cpu_path)
    cpu = read_cpu_info()
    if cpu_path != AUTO:
        return _open_named(next(path for path in supported_paths(cpu) if path.name == cpu_path))
    try:
        kernels = open_fastest(cpu)
    except LibraryUnavailableError as error:
        logger.warning("No native CPU kernels, slower torch operations instead: %s", error)
        return None
    return kernels


def load_sampler(vocab_size: int, max_slots: int) -> NativeSampler | None:
    """A sampler with threads of its own, for a pass without `NativeOps`; None without kernels."""
    kernels = load_kernels()
    if kernels is None:
        return None
    declare_functions(kernels.library)
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=16, page_size=16)
    engine = kernels.library.ps_create(num_usable_cores(), 0, ctypes.byref(shape))
    sampler = NativeSampler(kernels.library, engine, vocab_size, max_slots)
    weakref.finalize(sampler, kernels.library.ps_destroy, engine)
    return sampler


def _open_named(path: CpuPath) -> NativeKernels:
    try:
        library = open_build(path.build, machine_builds())
    except LibraryUnavailableError as error:
        raise StartupError(f"--cpu-path is {path.name}, whose kernels cannot be had: {error}") from error
    if path.uses_tiles and not request_tiles(library):
        raise StartupError(f"--cpu-path is {path.name}, and the system refuses AMX tiles to this process")
    logger.info("CPU kernels: path %s, as asked for", path.name)
    return NativeKernels(path, library)


def open_fastest(cpu: CpuInfo) -> NativeKernels:
    """Open the fastest path of the CPU, and compile its library if it is missing.

    Raises LibraryUnavailableError, with the reason of the best path, if no path can be opened.
    """
    paths = supported_paths(cpu)
    failures: list[LibraryUnavailableError] = []
    for path in paths:
        candidates = [path, *(other for other in paths if other.name == path.rival)]
        opened = _open_builds([candidate.build for candidate in candidates])
        library = opened[path.build]
        if isinstance(library, LibraryUnavailableError):
            failures.append(library)
            continue
        if path.uses_tiles and not request_tiles(library):
            continue
        usable = [
            NativeKernels(candidate, library)
            for candidate in candidates
            if not isinstance(library := opened[candidate.build], LibraryUnavailableError)
        ]
        if failures:
            logger.warning("CPU kernels: path %s, because no better one can be had: %s", path.name, failures[0])
        return choose_kernels(usable, cpu)
    if failures:
        raise failures[0]
    names = ", ".join(path.name for path in machine_paths()) or "none"
    raise LibraryUnavailableError(f"this CPU ({platform.machine()}) supports no path of theirs: {names}")


def _open_builds(builds: list[KernelBuild]) -> dict[KernelBuild, ctypes.CDLL | LibraryUnavailableError]:
    """Open the builds; those that must be compiled are compiled at the same time."""

    def try_open(build: KernelBuild) -> ctypes.CDLL | LibraryUnavailableError:
        try:
            return open_build(build, machine_builds())
        except LibraryUnavailableError as error:
            return error

    distinct = list(dict.fromkeys(builds))
    with ThreadPoolExecutor(len(distinct)) as pool:
        return dict(zip(distinct, pool.map(try_open, distinct), strict=True))


def choose_kernels(candidates: list[NativeKernels], cpu: CpuInfo) -> NativeKernels:
    """Return the fastest of the candidates; the first is the expected one.

    Measures them unless there is a record for the same CPU and sources.
    """
    expected = candidates[0]
    if len(candidates) == 1:
        logger.info("CPU kernels: path %s", expected.path.name)
        return expected
    by_name = {kernels.path.name: kernels for kernels in candidates}
    key = "\0".join((cpu.model, *sorted(cpu.flags), directory_name(machine_builds())))
    name = f"cpu-path-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    record = _read_record(name)
    if record is not None and record.path in by_name:
        origin = "as measured at an earlier start"
    else:
        times = time_products({name: (each.library, each.path.uses_tiles) for name, each in by_name.items()})
        record = _Record(_fastest(times), times)
        origin = _keep_record(name, record)
    logger.info("CPU kernels: path %s, %s: %s", record.path, origin, _describe(record))
    return by_name[record.path]


def _fastest(times: dict[str, tuple[float, ...]]) -> str:
    """The first path, unless another is faster by a clear margin."""
    expected, *rivals = times

    def share(name: str) -> float:
        return statistics.mean(mine / its for mine, its in zip(times[name], times[expected], strict=True))

    best = min(rivals, key=share)
    return best if share(best) < _RIVAL_GAIN else expected


def _describe(record: _Record) -> str:
    rows = " and ".join(map(str, TIMED_ROWS))
    parts = (f"{name} {', '.join(f'{ms:.2f}' for ms in times)} ms" for name, times in record.milliseconds.items())
    return f"a product of 8 MB with {rows} rows takes {'; '.join(parts)}"


def _read_record(name: str) -> _Record | None:
    """The record, or None if there is none that can be trusted and read."""
    try:
        path = cache_directory() / name
        check_directory(path.parent, Trust.READABLE, create=False)
        check_cached_file(path)
        with path.open("rb") as file:
            return _Record.decode(file.read(_MAX_RECORD_BYTES))
    except (OSError, UnsafeDirectory, ValueError, TypeError):
        return None


def _keep_record(name: str, record: _Record) -> str:
    """Write the record. Return how the choice was made, for the log."""
    try:
        directory = cache_directory()
        check_directory(directory, Trust.READABLE)
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
        try:
            with open(handle, "w") as file:
                file.write(record.encode())
            os.rename(temporary, directory / name)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, UnsafeDirectory) as error:
        return f"measured now, and again at each start because it cannot be kept ({error})"
    return f"measured now and kept in {directory / name}"
