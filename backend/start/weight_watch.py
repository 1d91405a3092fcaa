"""Compares weights that outlive the process with their checksums while it runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.forward_pass.extensions import HeldWeights

EVERY_S = 1.0
"""Interval of the checks. A part has a few MB, so this takes half a percent of a core, and checks 10 GB
within an hour."""


@dataclass(frozen=True, slots=True)
class WeightWatch:
    """Runs until the process ends, or until the weights are damaged, which it reports once."""

    weights: HeldWeights
    note: Callable[[int], None]
    """Called with the number of checks after each."""
    fail: Callable[[str], None]
    every_s: float = EVERY_S

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="weights", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        pause = threading.Event()
        damage = None
        while damage is None:
            pause.wait(self.every_s)
            damage = self.weights.check_next()
            self.note(self.weights.num_checks)
        self.fail(f"the weights in memory are damaged, so no later backend gets them: {damage}")
