"""A named check of a kernel, which the catalogues list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.backend.passes.decoder.cuda.device.launcher import Launcher


@dataclass(frozen=True)
class Check:
    """A named check. run raises Mismatch, or returns the measured error if there is one."""

    family: str
    name: str
    run: Callable[[Launcher], float | None]
    is_of_8b: bool = True
    """Whether the 8B model runs it: heads of 128 in groups of 4 or none; bf16 activations or a KV dtype's own."""
