"""Finds a forward pass by its installed name (entry point group penstock.forward_pass) or by "package.module:Class"."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.forward_pass import IBatchedForwardPass

GROUP = "penstock.forward_pass"
_METHODS = ("describe", "load", "create_cache", "forward", "sample", "host_logits", "close")


def find_forward_pass(name: str) -> type[IBatchedForwardPass]:
    """The class; it is imported, not loaded. Raises StartupError naming what is installed."""
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
        # Whatever the module does as it is imported: it is somebody else's, and the operator named it.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StartupError(f'forward pass "{name}" cannot be imported: {reason}') from error
    missing = [method for method in _METHODS if not hasattr(found, method)]
    if missing:
        raise StartupError(f'"{name}" is no forward pass: it has no {", ".join(missing)}')
    return cast("type[IBatchedForwardPass]", found)
