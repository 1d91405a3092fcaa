"""Opens the shared objects of the native CPU kernels: kernels/cpu.cpp, compiled once for each path (cpu_paths.py).

All objects of an architecture are in one directory, whose name hashes sources and flags but not the CPU: objects
compiled on one machine run on another. `penstock compile-kernels` compiles all of them beside the package, where every
start looks first. Otherwise a start compiles the ones it needs into the user's cache, or for itself alone if that
directory cannot be used. An object is renamed into place once it is complete.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from penstock.backend.checkpoint.files.progress import waiting_bar
from penstock.backend.passes.cpu.library.cpu_paths import KernelBuild
from penstock.backend.passes.cpu.library.thread_counts import num_usable_cores
from penstock.process.cache_directory import cache_directory, check_cached_file
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

logger = logging.getLogger("penstock.backend")

SOURCE = Path(__file__).parents[1] / "kernels" / "cpu.cpp"
COMPILED_DIR = Path(__file__).parents[1] / "compiled"
"""Filled by `penstock compile-kernels`; read by every start."""
ABI = 23
STEP_BUILD = KernelBuild(
    "step", (f"-DPS_ABI={ABI}",), Path(__file__).parents[2] / "cuda/kernels/step/pack_step.cpp"
)  # fmt: skip
"""The code by which any CPU packs a step for a GPU."""

_UNTIL_END_OF_INPUT = 'exec 3<&0; { read -r _ <&3; kill 0; } & "$@" </dev/null 3<&-; status=$?; kill $!; exit $status'
"""Runs a command, and ends its process group when the input's other end closes."""
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w")
"""Without contraction: GCC would fuse a product and a sum in some copies of a loop and not in others, so a row's bits
would depend on the rows beside it. Where they are to be fused, the source says so."""

_COMPILE_TIMEOUT_S = 300.0


class LibraryUnavailableError(Exception):
    """A library is not available. The message is the reason, in one line."""


class CacheUnusableError(LibraryUnavailableError):
    """The directory that keeps the library cannot be used. Compiling into another directory may succeed."""


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


def find_compiler() -> str | None:
    """The path of the C++ compiler: $CXX, or the first of the usual names; None without one."""
    names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def directory_name(builds: tuple[KernelBuild, ...]) -> str:
    """The name of the directory of these builds: a hash of everything that determines their code.

    Raises LibraryUnavailableError for unreadable sources.
    """
    digest, source = hashlib.sha256(), _source(*builds[:1])
    try:
        for path in (source, *sorted(source.parent.rglob("*.h"))):
            digest.update(b"\0".join((path.name.encode(), path.read_bytes(), b"")))
    except OSError as error:
        raise LibraryUnavailableError(str(error)) from error
    for build in builds:
        digest.update(" ".join((build.name, *_FLAGS, *build.compiler_flags, "\0")).encode())
    return f"{source.stem}-{digest.hexdigest()[:24]}"


def _source(build: KernelBuild | None = None) -> Path:
    return SOURCE if build is None or build.source is None else build.source


def open_build(build: KernelBuild, builds: tuple[KernelBuild, ...]) -> ctypes.CDLL:
    """Open one of the builds where it is stored; if it is nowhere, compile it, which takes about half a minute.

    Raises LibraryUnavailableError.
    """
    name = directory_name(builds)
    if (COMPILED_DIR / name / f"{build.name}.so").exists():
        try:
            return open_library(COMPILED_DIR / name, build, compiler=None, create=False)
        except LibraryUnavailableError as error:
            logger.warning("The compiled CPU kernels of this installation are not used: %s", error)
    compiler = find_compiler()
    try:
        return open_library(cache_directory() / name, build, compiler)
    except (CacheUnusableError, UnsafeDirectory) as error:
        return _open_in_temporary_directory(build, compiler, str(error))


def open_library(directory: Path, build: KernelBuild, compiler: str | None, *, create: bool = True) -> ctypes.CDLL:
    """Load the library from the directory; compile it first if it is missing.

    Raises CacheUnusableError for a directory that cannot be written, that others may write, or whose library cannot be
    loaded, and LibraryUnavailableError for a missing compiler or a failed compilation.
    """
    path = directory / f"{build.name}.so"
    try:
        check_directory(directory, Trust.READABLE, create=create)
        if not path.exists():
            with waiting_bar("Compiling CPU kernels"), _alone(path):
                if not path.exists():
                    _compile(path, compiler, build)
        check_cached_file(path)
        library = ctypes.CDLL(str(path))
        abi = library.ps_abi()
    except (OSError, UnsafeDirectory, AttributeError) as error:
        raise CacheUnusableError(str(error)) from error
    if abi != ABI:
        raise LibraryUnavailableError(f"{path} has interface {abi}, not {ABI}")
    return library


def compile_builds(out: Path, builds: tuple[KernelBuild, ...]) -> Path:
    """Compile all builds into a directory below out that every user may read, and return it.

    Raises LibraryUnavailableError; builds that are already complete stay.
    """
    directory = out / directory_name(builds)
    compiler = find_compiler()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_directory(directory, Trust.READABLE, create=False)
        with ThreadPoolExecutor(num_usable_cores()) as pool:
            for _ in pool.map(lambda build: _compile(directory / f"{build.name}.so", compiler, build), builds):
                pass
        for path in (directory, *directory.glob("*.so")):
            path.chmod(0o755)
    except (OSError, UnsafeDirectory) as error:
        raise LibraryUnavailableError(str(error)) from error
    return directory


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for another process that compiles this object: replicas start together and need the same one."""
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        with suppress(OSError):  # a file system without locks: each compiles, and the last object stays
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _open_in_temporary_directory(build: KernelBuild, compiler: str | None, reason: str) -> ctypes.CDLL:
    """Compile for this process alone. The directory is removed at once: a loaded library needs no file."""
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as directory:
            library = open_library(Path(directory), build, compiler)
    except OSError as error:
        raise LibraryUnavailableError(f"{reason}; no temporary directory either: {error}") from error
    _warn_not_kept(reason)
    return library


@cache
def _warn_not_kept(reason: str) -> None:
    logger.warning(
        "The compiled CPU kernels cannot be kept (%s), so every start compiles them again: set XDG_CACHE_HOME to a "
        "directory that only this user can write",
        reason,
    )


def _compile(path: Path, compiler: str | None, build: KernelBuild) -> None:
    if compiler is None:
        raise LibraryUnavailableError("no C++ compiler: install g++ or clang++, or set CXX to another")
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        source = _source(build)
        logger.info("Compiling %s for %s with %s, up to half a minute", source.name, build.name, compiler)
        started_s = time.monotonic()
        _run_compiler([compiler, *_FLAGS, *build.compiler_flags, f"-I{source.parent}", "-o", temporary, str(source)])
        os.chmod(temporary, 0o700)
        os.rename(temporary, path)
        logger.info("Compiled it for %s in %.1f s", build.name, time.monotonic() - started_s)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run_compiler(command: list[str]) -> None:
    """The compiler's own processes end with this one, however it ends."""
    read_end, write_end = os.pipe()
    try:
        result = subprocess.run(
            ["/bin/sh", "-c", _UNTIL_END_OF_INPUT, "sh", *command],
            stdin=read_end,
            process_group=0,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LibraryUnavailableError(f"{command[0]} took over {_COMPILE_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise LibraryUnavailableError(f"{command[0]} cannot be started: {error}") from error
    finally:
        os.close(read_end)
        os.close(write_end)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        raise LibraryUnavailableError(f"{command[0]} failed: {errors[0] if errors else result.returncode}")
