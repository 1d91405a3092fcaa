"""Keeps the garbage collector off what a process makes once: modules, classes, tables, loaded models.

A process that imports much calls `pause_collection` before its imports, and `resume_collection` when it has started.
Between them, `spare_imports` lets the first collection skip modules, which would take most of its time.
"""

from __future__ import annotations

import atexit
import gc


def pause_collection() -> None:
    """Collect no garbage until `resume_collection`, nor when the process ends."""
    gc.disable()
    atexit.register(gc.freeze)


def spare_imports() -> None:
    """Never visit the objects made so far, nor any when the process ends.

    Cycles that are garbage now stay: call it when little more than imports has run.
    """
    gc.freeze()
    atexit.register(gc.freeze)


def resume_collection() -> None:
    """Collect the garbage made so far; never visit what is left; collect from now on."""
    gc.collect()
    gc.freeze()
    gc.enable()
