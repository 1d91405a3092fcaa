"""`penstock compile-kernels`: compiles the native CPU kernels for every CPU of this machine's architecture.

For images: the compiled kernels run without a compiler, on any CPU that has a path.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from penstock.backend.passes.cpu.library.cpu_paths import machine_builds
from penstock.backend.passes.cpu.library.native_library import (
    COMPILED_DIR,
    STEP_BUILD,
    LibraryUnavailableError,
    compile_builds,
)
from penstock.process.failure import fail


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompileKernelsOptions:
    """Compile the native CPU kernels for every CPU of this machine's architecture."""

    out: Path = COMPILED_DIR
    """Directory for the kernels. The default is in the installed package, where every start looks first. For another,
    make it $XDG_CACHE_HOME/penstock (~/.cache/penstock) of the user who serves; root or that user must own it."""


_DEFAULTS = CompileKernelsOptions()


def compile_kernels(options: CompileKernelsOptions = _DEFAULTS) -> int:
    """Run the command; return the exit status."""
    builds = machine_builds()
    if not builds:
        fail("penstock compile-kernels", f"there are no native kernels for {platform.machine()}")
    try:
        for own in (builds, (STEP_BUILD,)):
            directory = compile_builds(options.out.absolute(), own)
            print(*(directory / f"{build.name}.so" for build in own), sep="\n")
    except LibraryUnavailableError as error:
        fail("penstock compile-kernels", str(error))
    return 0
