"""A process that runs a section, or a share of one: how it ends with its parent, and learns that the GPU is lost."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def device_fault() -> str | None:
    """The error that waiting for the GPU raises; None if the GPU answers or this process does not use it."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    try:
        if cupy is not None:
            cupy.cuda.runtime.deviceSynchronize()
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as fault:  # noqa: BLE001 - after any error here the device is lost
        return next(iter(str(fault).splitlines()), type(fault).__name__)
    return None
