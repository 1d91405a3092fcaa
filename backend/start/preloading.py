"""Prepares a backend's process for its imports, most of which are torch's."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.backend.passes.cpu.library.thread_counts import configure_threads
from penstock.process.garbage_collection import pause_collection


def prepare_imports(arguments: Sequence[str]) -> None:
    """Call it before numpy and torch are imported."""
    pause_collection()
    configure_threads()
    if "--forward-pass" not in arguments:  # other passes may not need torch
        _preload_torch()


def _preload_torch() -> None:
    """Start to load torch's largest library, while the first modules are imported. If that is not possible, torch's
    import loads it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    library = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    # ctypes.CDLL(library) would keep the interpreter's lock; this call of a C function does not.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p  # it stays loaded, so the handle is not needed
    arguments = (ctypes.c_char_p(os.fsencode(library)), os.RTLD_LAZY)
    threading.Thread(target=dlopen, args=arguments, name="preload", daemon=True).start()
