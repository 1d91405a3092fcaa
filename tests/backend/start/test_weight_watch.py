"""Shared weights are checked while the backend runs, and damage ends it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from penstock.backend.engine.steps.executor import Executor, ExecutorFailed
from penstock.backend.passes.shared_weights.watch import WeightWatch


@dataclass
class Weights:
    results: list[str | None]
    num_bytes: int = 100
    is_mapped: bool = True
    num_checks: int = field(default=0)

    def check_next(self) -> str | None:
        self.num_checks += 1
        return self.results.pop(0)


def test_damage_is_found_after_some_checks_and_makes_the_engine_fail() -> None:
    executor = Executor(1)
    noted: list[int] = []
    WeightWatch(
        Weights([None, None, "bytes 0 to 4194304 have changed"]), noted.append, executor.fail, 0.0
    ).start().join()
    assert noted == [1, 2, 3]
    assert os.eventfd_read(executor.wake_fd) == 1  # the engine's loop wakes
    with pytest.raises(ExecutorFailed, match="are damaged, so no later backend gets them: bytes 0 to 4194304"):
        executor.results()
    os.close(executor.wake_fd)
