"""A backend that waits, with its imports done, until it must replace one that has ended."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

from penstock import backend
from penstock.backend.checkpoint.fingerprint import code_hash
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.process.children import wait_for_turn


def import_and_wait(forward_pass: str, turn_fd: int) -> bool:
    """Import slow packages and all of the backend, whose files may be another version's when the turn comes. Then wait.

    Return False if this backend is not needed.
    """
    with contextlib.suppress(StartupError):  # `serve` reports it
        find_forward_pass(forward_pass)
    for module in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}."):
        with contextlib.suppress(ImportError):  # `serve` reports the missing package, if it needs that module
            importlib.import_module(module.name)
    code_hash()  # of the code that is imported now
    return wait_for_turn(turn_fd)
