"""Finds a forward pass by its installed name (entry point group penstock.forward_pass) or by "package.module:Class"."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from backend.errors import StartupError

if TYPE_CHECKING:
    from backend.forward_pass import IBatchedForwardPass

GROUP = "penstock.forward_pass"


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
    except (ImportError, AttributeError) as error:
        raise StartupError(f'forward pass "{name}" cannot be imported: {error}') from error
    missing = [method for method in ("load", "forward", "sample", "create_cache") if not hasattr(found, method)]
    if missing:
        raise StartupError(f'"{name}" is no forward pass: it has no {", ".join(missing)}')
    return cast("type[IBatchedForwardPass]", found)
