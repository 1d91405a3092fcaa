"""Finds a forward pass by its installed name (entry point group penstock.forward_pass) or as "package.module:Class"."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import cast

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass

GROUP = "penstock.forward_pass"
_METHODS = ("describe", "load", "create_cache", "forward", "sample", "close")


def find_forward_pass(name: str) -> type[IBatchedForwardPass]:
    """Import the class; nothing is loaded. Raises StartupError, which lists the installed names."""
    installed = entry_points(group=GROUP)
    if ":" not in name:
        matches = installed.select(name=name)
        if not matches:
            known = ", ".join(sorted(installed.names)) or "none"
            raise StartupError(
                f'forward pass "{name}" is not installed (installed: {known}; or "package.module:Class")'
            )
        name = next(iter(matches)).value
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        # The module is third-party code: importing it may raise anything.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StartupError(f'forward pass "{name}" cannot be imported: {reason}') from error
    missing = [method for method in _METHODS if not hasattr(found, method)]
    if missing:
        raise StartupError(f'"{name}" is not a forward pass: it has no {", ".join(missing)}')
    return cast("type[IBatchedForwardPass]", found)
