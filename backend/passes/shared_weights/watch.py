"""Compares shared weights with their checksums, a block at a time, while the process runs."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.backend.forward_pass.extensions import SharedWeights
from penstock.backend.passes.shared_weights.blocks import SharedBlocks, SharedWeightsError, WeightStore
from penstock.shm.buffers.device_api import DeviceError

logger = logging.getLogger("penstock.backend")


class WatchedWeights:
    """Implements `extensions.ISharedWeights`. Owns the blocks, and opens the store for itself."""

    def __init__(self, store: WeightStore, blocks: SharedBlocks, *, is_mapped: bool) -> None:
        self._store = store.duplicate()
        self._blocks = blocks
        self._order = self._blocks_in_turn()
        self.num_bytes = blocks.num_bytes
        self.is_mapped = is_mapped
        self.num_checks = 0
        self._lock = threading.Lock()
        self._is_closed = self._is_lost = False

    def check_next(self) -> str | None:
        """Check one block; all are checked in turn, in a new order each time.

        Returns what is wrong, or nothing; after an error no later backend finds the weights.
        """
        with self._lock:
            if self._is_closed or self._is_lost:
                return None
            try:
                self._blocks.check(next(self._order))
            except SharedWeightsError as error:
                with self._store.locked():
                    if self._store.holds(self._blocks.fd):
                        self._store.clear()
                return str(error)
            except DeviceError as error:  # the next step fails too; the weights may be whole
                logger.error("shared weights cannot be read, and are checked no more: %s", error)
                self._is_lost = True
                return None
            self.num_checks += 1
            return None

    def close(self) -> None:
        """Leave the weights to later processes. Idempotent; the mapping stays valid."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._blocks.close()
                self._store.close()

    def _blocks_in_turn(self) -> Iterator[int]:
        count = len(self._blocks)
        return itertools.chain.from_iterable(iter(lambda: random.sample(range(count), count), None))


EVERY_S = 1.0
"""Interval of the checks. A part has a few MB, so this takes half a percent of a core, and checks 10 GB
within an hour."""


@dataclass(frozen=True, slots=True)
class WeightWatch:
    """Runs until the process ends, or until the weights are damaged, which it reports once."""

    weights: SharedWeights
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
