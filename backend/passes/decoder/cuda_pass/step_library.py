"""The host's part of a step (`STEP_BUILD`)."""

from __future__ import annotations

from ctypes import CDLL

from penstock.backend.errors import StartupError
from penstock.backend.passes.cpu.library.native_library import STEP_BUILD, LibraryUnavailableError, open_build


def open_step_library() -> CDLL:
    """Raises StartupError."""
    try:
        return open_build(STEP_BUILD, (STEP_BUILD,))
    except LibraryUnavailableError as error:
        raise StartupError(f"the GPU pass cannot pack its steps: {error}; or run penstock compile-kernels") from error
