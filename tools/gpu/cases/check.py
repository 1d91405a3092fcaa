"""A named check of a kernel, which the catalogues list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.backend.passes.cuda.device.launcher import Launcher


@dataclass(frozen=True)
class Check:
    """A named check. run raises Mismatch, or returns the measured error if there is one."""

    family: str
    name: str
    run: Callable[[Launcher], float | None]


def check_of(family: str, name: str, function: Callable[..., float | None], /, **arguments: Any) -> Check:
    """A check that calls a function of a launcher and these arguments."""
    return Check(family, name, partial(function, **arguments))
