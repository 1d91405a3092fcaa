"""Load the native CPU kernels: kernels/cpu.cpp, compiled on this machine at the first start and kept.

The kernels are optional: without a compiler, or on a CPU that they do not support, `load_library` logs one line and
returns None. The library is kept in a private directory under a name that hashes sources, flags and CPU; it is renamed
into place once it is complete. If that directory cannot be used, each start compiles into a temporary one.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from penstock.shm.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.backend")

SOURCE = Path(__file__).parent / "kernels" / "cpu.cpp"
ABI = 3

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
AVX2_FLAGS = ("-mno-avx512f", "-mavx2", "-mfma", "-mf16c")
"""Compiles the kernels of a machine without AVX-512 on one that has it, for tests."""
EMULATED_TILES_FLAGS = ("-DPENSTOCK_EMULATED_TILES",)
"""Compiles products on tiles for a machine without AMX, with the same results, for tests."""

_COMPILE_TIMEOUT_S = 120.0


class LibraryUnavailableError(Exception):
    """There are no native kernels. The message is the reason, in one line."""


class CacheUnusableError(LibraryUnavailableError):
    """The directory that keeps the library cannot be used. Compiling into another directory may succeed."""


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, or None if this machine cannot have them. Compiling them takes about ten seconds."""
    compiler = find_compiler()
    try:
        try:
            return open_library(cache_dir(), compiler)
        except CacheUnusableError as error:
            return _open_in_temporary_directory(compiler, error)
    except LibraryUnavailableError as error:
        logger.warning("No native CPU kernels, slower torch operations instead: %s", error)
        return None


@cache
def request_tiles(library: ctypes.CDLL) -> bool:
    """Ask the system for AMX tiles for this process; call it before the kernels' threads start.

    Returns False for a library without tiles, and where the system refuses them, which is logged.
    """
    error: int = library.ps_request_tiles()
    if error > 0:
        logger.warning(
            "The system refuses AMX tiles to this process, so bf16 products use AVX-512, slower from 2 rows on: %s",
            os.strerror(error),
        )
    return error == 0


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/penstock, by default ~/.cache/penstock. Raises CacheUnusableError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError as error:
        raise CacheUnusableError("this user has no home directory") from error


def find_compiler() -> str | None:
    """The path of the C++ compiler: $CXX, or the first of the usual names; None without one."""
    names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def open_library(directory: Path, compiler: str | None, more_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library from the directory; compile it first if it is missing.

    Raises CacheUnusableError for a directory that cannot be written, that others may write, or whose library cannot be
    loaded, and LibraryUnavailableError for unreadable sources, a missing compiler or a failed compilation.
    """
    try:
        path = directory / f"cpu-{_fingerprint(more_flags)}.so"
    except OSError as error:
        raise LibraryUnavailableError(str(error)) from error
    try:
        check_directory(directory, Trust.READABLE)
        if not path.exists():
            _compile(path, compiler, more_flags)
        _check_owner(path)
        library = ctypes.CDLL(str(path))
        abi = library.ps_abi()
    except (OSError, UnsafeDirectory, AttributeError) as error:
        raise CacheUnusableError(str(error)) from error
    if abi != ABI:
        raise LibraryUnavailableError(f"{path} has interface {abi}, not {ABI}")
    return library


def _open_in_temporary_directory(compiler: str | None, reason: CacheUnusableError) -> ctypes.CDLL:
    """Compile for this process alone. The directory is removed at once: a loaded library needs no file."""
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as directory:
            library = open_library(Path(directory), compiler)
    except OSError as error:
        raise LibraryUnavailableError(f"{reason}; no temporary directory either: {error}") from error
    logger.warning(
        "The compiled CPU kernels cannot be kept (%s), so every start compiles them again: set XDG_CACHE_HOME to a "
        "directory that only this user can write",
        reason,
    )
    return library


def _fingerprint(more_flags: tuple[str, ...]) -> str:
    """A hash of everything that determines the code: sources, flags, CPU."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model", "flags"))]
    files = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
    sources = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    parts = (*sources, " ".join(_FLAGS + more_flags).encode(), "\n".join(sorted(set(cpu))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _check_owner(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CacheUnusableError(f"{path} is not a file, can be written by others or belongs to another user")


def _compile(path: Path, compiler: str | None, more_flags: tuple[str, ...]) -> None:
    if compiler is None:
        raise LibraryUnavailableError("no C++ compiler: install g++ or clang++, or set CXX to another")
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        logger.info("Compiling the CPU kernels with %s; this takes about ten seconds", compiler)
        started_s = time.monotonic()
        _run_compiler([compiler, *_FLAGS, *more_flags, "-o", temporary, str(SOURCE)])
        os.chmod(temporary, 0o700)
        os.rename(temporary, path)
        logger.info("Compiled the CPU kernels in %.1f s", time.monotonic() - started_s)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run_compiler(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailableError(f"{command[0]} took over {_COMPILE_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise LibraryUnavailableError(f"{command[0]} cannot be started: {error}") from error
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        raise LibraryUnavailableError(f"{command[0]} failed: {errors[0] if errors else result.returncode}")
