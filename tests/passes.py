"""Forward passes for tests: the fake pass, slowed down to the speed of a device or with faults."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.passes.fake import FakePass, FakeTower, PacedFakePass

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import PassOptions, PassSpec, StepBatch


class _FaultyFakePass(FakePass):
    """Every step raises `fault`, except the two that the backend runs at start."""

    fault: BaseException
    _num_steps = 0

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        if self._num_steps == 2:
            raise self.fault
        self._num_steps += 1
        return super().forward(batch)


class DyingFakePass(_FaultyFakePass):
    """The fault ends the thread that runs the step, as a fault below Python would."""

    fault = SystemExit("planted")


class FailingFakePass(_FaultyFakePass):
    fault = RuntimeError("planted")


class WideFakePass(FakePass):
    """Its logits are one column wider than its vocabulary."""

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        return np.pad(super().forward(batch), ((0, 0), (0, 1)))


class SmallVocabularyPass(FakePass):
    """It has one token fewer than the demo model's tokenizer."""

    VOCAB_SIZE = 4095

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        return replace(super().describe(model_dir, options), vocab_size=cls.VOCAB_SIZE)

    @classmethod
    def load(cls, _model_dir: Path | None, options: PassOptions) -> SmallVocabularyPass:
        return cls(cls.VOCAB_SIZE, options.max_running, options.host_kv_bytes)


class PaddedVocabularyPass(SmallVocabularyPass):
    """It has tokens that the demo model's tokenizer does not have."""

    VOCAB_SIZE = 4160


class UnclosableFakePass(FakePass):
    """Serves, but cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("planted")


class SlowFakePass(PacedFakePass):
    """Streams that last long enough to be interrupted, of few tokens: each costs time of server and client."""

    STEP_S = 0.02


class SlowestFakePass(PacedFakePass):
    """Slow enough that a hundred streams run when the last one has begun."""

    STEP_S = 0.08


class _HeldTower(FakeTower):
    """Says when it encodes a picture, and waits for the file `go`, a few milliseconds at a time."""

    def __init__(self, go: Path) -> None:
        self._go = go

    def encode(
        self, pixels: NDArray[np.uint8], grid: tuple[int, int, int], give_way: Callable[[], None]
    ) -> NDArray[np.float32]:
        print("encoding", flush=True)
        while not self._go.exists():
            give_way()
            time.sleep(0.005)
        return super().encode(pixels, grid, give_way)


class HeldTowerFakePass(FakePass):
    """Takes pictures once the file `go` is in the model's directory."""

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> FakePass:
        assert model_dir is not None
        loaded = super().load(model_dir, options)
        loaded.picture_tower = _HeldTower(model_dir / "go")
        return loaded
