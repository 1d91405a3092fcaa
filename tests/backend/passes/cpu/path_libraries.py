"""The kernels of each path on any CPU: compiled as they are, or for an emulation of the instructions that are missing.

Libraries are compiled once and kept in the user's cache, so all tests share them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import pytest

from penstock.backend.passes.cpu.library.cpu_paths import (
    KernelBuild,
    machine_builds,
    read_cpu_info,
    supported_paths,
)
from penstock.backend.passes.cpu.library.native_library import (
    directory_name,
    find_compiler,
    open_library,
)
from penstock.process.cache_directory import cache_directory

QUICKLY_COMPILED = ("-Og",)
"""Takes a third of the time of -O3, for code that only tests run."""
_QUICKLY_COMPILED_AND_RUN = ("-O1",)
"""Takes half of the time of -O3. -Og leaves emulations, and sixteen numbers in two vectors, in memory."""
_SIMDE_HEADER = Path(__file__).parent / "simde" / "immintrin.h"
# The hash makes a changed header another build.
_SIMDE_FLAGS = (
    "-isystem",
    str(_SIMDE_HEADER.parent),
    f"-DHEADER_{hashlib.sha256(_SIMDE_HEADER.read_bytes()).hexdigest()[:16]}",
    *("-mavx2", "-mfma", "-mf16c"),
    *_QUICKLY_COMPILED_AND_RUN,
)
EMULATED = {
    "avx512": KernelBuild("avx512-simde", _SIMDE_FLAGS),
    "avx512_bf16": KernelBuild("avx512_bf16-simde", (*_SIMDE_FLAGS, "-DPENSTOCK_SIMDE_BF16")),
}


def open_path(name: str) -> ctypes.CDLL:
    """The library of a path: its own if this CPU supports it, else with its instructions emulated by SIMDe.

    What this machine uses has its own flags.
    """
    supported = {path.name: path for path in supported_paths(read_cpu_info())}
    if name in supported:
        build = supported[name].build
        if build in used_builds():
            return _open(build, machine_builds())
        flags = _QUICKLY_COMPILED_AND_RUN if name == "avx2" else QUICKLY_COMPILED
        quick = KernelBuild(build.name, (*build.compiler_flags, *flags))
        return _open(quick, (quick,))
    if platform.machine() != "x86_64" or name not in EMULATED:
        pytest.skip(f"this CPU does not support {name}")
    require_simde()
    return _open(EMULATED[name], (EMULATED[name],))


@cache
def used_builds() -> tuple[KernelBuild, ...]:
    """The builds that a start on this machine compiles; tests use them as they are."""
    best, *others = supported_paths(read_cpu_info())
    return best.build, *(path.build for path in others if path.name == best.rival)


def open_emulated_tiles() -> ctypes.CDLL:
    """The vectors that this machine uses, with tiles in plain C++ that have the same results as AMX."""
    paths = supported_paths(read_cpu_info())
    if platform.machine() != "x86_64" or not paths:
        pytest.skip("needs an x86-64 CPU with AVX2")
    flags = (*paths[0].build.compiler_flags, "-DPENSTOCK_EMULATED_TILES", *_QUICKLY_COMPILED_AND_RUN)
    build = KernelBuild(f"{paths[0].build.name}-tiles", flags)
    return _open(build, (build,))


def _open(build: KernelBuild, builds: tuple[KernelBuild, ...]) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    directory = cache_directory() / directory_name(builds)
    return open_library(directory, build, compiler)


@cache
def require_simde() -> None:
    """Skip the test without SIMDe's headers; in CI, which sets TESTS_REQUIRE_ROOT, fail it."""
    compiler = find_compiler()
    if compiler is None:
        return
    command = [compiler, "-E", "-xc++", "-"]
    source = b"#include <simde/x86/avx512.h>\n"
    if subprocess.run(command, input=source, capture_output=True, check=False).returncode == 0:
        return
    missing = "this CPU has no AVX-512, and the headers that emulate it are missing: install libsimde-dev"
    if "TESTS_REQUIRE_ROOT" in os.environ:
        pytest.fail(missing)
    pytest.skip(missing)
