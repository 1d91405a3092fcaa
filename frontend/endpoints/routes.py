"""One endpoint of the table in `penstock.frontend.app`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.frontend.endpoints.reference import Doc
    from penstock.frontend.transport.exchange import Exchange

Methods = dict[str, "Route"]


@dataclass(frozen=True, slots=True)
class Route:
    handler: Callable[[Exchange], Awaitable[None]]
    doc: Doc
    needs_key: bool = True


def reading(handler: Callable[[Exchange], Awaitable[None]], doc: Doc, *, needs_key: bool = True) -> Methods:
    """GET, and HEAD with it."""
    return dict.fromkeys(("GET", "HEAD"), Route(handler, doc, needs_key))


def pattern(path: str) -> re.Pattern[str] | None:
    """What matches a path with parameters in braces; None where it has none. A model's name may have slashes."""
    if "{" not in path:
        return None
    anything = {"{model}": ".+"}
    parts = [anything.get(part, "[^/]+") if part.startswith("{") else re.escape(part) for part in path.split("/")]
    return re.compile("/".join(parts))
