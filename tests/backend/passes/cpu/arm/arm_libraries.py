"""Libraries of the kernels for ARM, compiled and run on x86-64: by a cross compiler, and by qemu as the CPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from penstock.backend.passes.cpu.library.cpu_paths import PATHS, KernelBuild
from penstock.backend.passes.cpu.library.native_library import compile_builds, directory_name
from penstock.process.cache_directory import cache_directory
from tests.backend.passes.cpu.arm.kernel_driver import KernelDriver
from tests.backend.passes.cpu.path_libraries import QUICKLY_COMPILED
from tests.temporary import make_shared_directory

_COMPILER, _EMULATOR, _LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
_DRIVER = Path(__file__).parent / "kernel_driver.cpp"

# What neon_dotprod compiles is in neon or in neon_bf16.
CPUS = {"neon": "cortex-a72", "neon_bf16": "max"}
"""qemu's CPU for each path. A Cortex-A72 has ARMv8.0 only: instructions of later versions end the process."""

_BUILDS = tuple(
    KernelBuild(path.name, (*path.build.compiler_flags, *QUICKLY_COMPILED))
    for path in PATHS["aarch64"]
    if path.name in CPUS
)


def start_driver(path: str, monkeypatch: pytest.MonkeyPatch, cpu: str | None = None) -> KernelDriver:
    """A driver of one of CPUS' paths, by default on its CPU."""
    _require_cross_compiler()
    emulator = [_EMULATOR, "-L", _LIBRARIES, "-cpu", cpu or CPUS[path]]
    return KernelDriver([*emulator, str(_compile_driver())], _compile_libraries(monkeypatch) / f"{path}.so")


def _require_cross_compiler() -> None:
    """Skip the test where something is missing; in CI, which sets TESTS_REQUIRE_ROOT, fail it."""
    if platform.machine() != "x86_64":
        pytest.skip("kernels for ARM are emulated on x86-64 only")
    found = {name: shutil.which(name) is not None for name in (_COMPILER, _EMULATOR)}
    found[f"{_LIBRARIES}/lib/libc.so.6"] = Path(_LIBRARIES, "lib", "libc.so.6").exists()
    if all(found.values()):
        return
    names = " and ".join(name for name, is_found in found.items() if not is_found)
    reason = f"kernels for ARM need {names}: apt-get install g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
    if "TESTS_REQUIRE_ROOT" in os.environ:
        pytest.fail(reason)
    pytest.skip(reason)


def _compile_libraries(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile the libraries of all ARM paths, unless the user's cache has them."""
    directory = cache_directory() / "arm" / directory_name(_BUILDS)
    if not all((directory / f"{build.name}.so").exists() for build in _BUILDS):
        monkeypatch.setenv("CXX", _COMPILER)
        compile_builds(directory.parent, _BUILDS)
    return directory


@cache
def _compile_driver() -> Path:
    program = make_shared_directory() / "kernel_driver"
    subprocess.run([_COMPILER, "-O1", "-std=c++17", "-o", str(program), str(_DRIVER), "-ldl"], check=True)
    return program
