"""The kernels (kernels/cpu.cpp and its headers) as a loaded library: compiled with the machine's own compiler at first
use, and kept.

Never required: without a compiler, or on a CPU that the kernels do not serve, `load_library` logs one line and returns
None. The library lies in a private directory, under a name that hashes source, flags and CPU, and appears there whole.
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
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "kernels" / "cpu.cpp"
ABI = 2

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
AVX2_FLAGS = ("-mno-avx512f", "-mavx2", "-mfma", "-mf16c")
"""Flags for the kernels of a machine without AVX-512, to be tried on one that has it."""

_COMPILE_TIMEOUT_S = 120.0


class LibraryUnavailableError(Exception):
    """Why there are no native kernels, in one line."""


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, or None where this machine cannot have them."""
    try:
        return open_library(cache_dir(), find_compiler())
    except LibraryUnavailableError as error:
        logger.warning("No native CPU kernels, slower torch operations instead: %s", error)
        return None


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "penstock"


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names."""
    names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def open_library(directory: Path, compiler: str | None, more_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Loads the library from directory, compiling it first where it is not there.

    Raises LibraryUnavailableError for a missing compiler, a failed compilation, or a directory that others may write.
    """
    try:
        path = directory / f"cpu-{_fingerprint(more_flags)}.so"
        _make_private(directory)
        if not path.exists():
            _compile(path, compiler, more_flags)
        _check_owner(path)
        library = ctypes.CDLL(str(path))
        if library.ps_abi() != ABI:
            raise LibraryUnavailableError(f"{path} has another interface")
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(str(error)) from error
    return library


def _fingerprint(more_flags: tuple[str, ...]) -> str:
    """Of all that decides the code: sources, flags, CPU."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model", "flags"))]
    files = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
    sources = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    parts = (*sources, " ".join(_FLAGS + more_flags).encode(), "\n".join(sorted(set(cpu))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(directory)


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LibraryUnavailableError(f"{path} is not ours alone to write")


def _compile(path: Path, compiler: str | None, more_flags: tuple[str, ...]) -> None:
    if compiler is None:
        raise LibraryUnavailableError("no C++ compiler (g++, c++ or clang++; set CXX to name another)")
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        logger.info("Compiling the CPU kernels, once for this machine")
        command = [compiler, *_FLAGS, *more_flags, "-o", temporary, str(SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            raise LibraryUnavailableError(f"{compiler} failed: {errors[0] if errors else result.returncode}")
        os.chmod(temporary, 0o700)
        os.rename(temporary, path)
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailableError(f"{compiler} took over {_COMPILE_TIMEOUT_S:.0f} s") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
