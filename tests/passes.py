"""Forward passes for tests: the fake pass at the pace of a device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.backend.passes.fake import FakePass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import StepBatch


class PacedFakePass(FakePass):
    """Steps that last as a real model's do, so that requests overlap and can be caught in the middle."""

    STEP_S = 0.004

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        time.sleep(self.STEP_S)
        return super().forward(batch)


class DyingFakePass(FakePass):
    """Its first step ends the thread that runs it, as a fault below Python would."""

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        raise SystemExit("planted")


class FailingFakePass(FakePass):
    """Every step fails."""

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        raise RuntimeError("planted")


class UnclosableFakePass(FakePass):
    """Serves, but cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("planted")
