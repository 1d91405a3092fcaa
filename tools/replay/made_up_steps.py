"""The steps of a replay that computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.engine.steps.launched_step import LaunchedStep
from penstock.backend.forward_pass import StepOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.engine.steps.launched_step import PageSaves
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.tools.replay.arrivals import Arrivals

VECTOR_WIDTHS = {"embed": 1}
"""`PassSpec.pooled` of the pass that samples made-up tokens."""


class MadeUpSteps:
    """Computes nothing: a sequence samples its made-up tokens, and stops where it stopped in the recording."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def launch(self, plan: Plan, _batch: StepBatch, _saves: PageSaves) -> LaunchedStep:
        """Like `launch_step`."""
        kept = plan.live_rows()
        if len(kept) < len(plan):
            plan = plan.keep(kept)
        if not plan.logit_rows and not plan.pooled_rows:
            return LaunchedStep(plan, None)
        token_ids = self._sample(plan) if plan.logit_rows else np.empty(0, np.int32)
        vectors = tuple(np.zeros(1, np.float32) for _ in plan.pooled_rows) or None
        return LaunchedStep(plan, StepOutput(token_ids, pooled=vectors), widths=VECTOR_WIDTHS)

    def _sample(self, plan: Plan) -> NDArray[np.int32]:
        numbers, positions = [], []
        for index in plan.logit_rows:
            subscriber = next(iter(plan.sequences[index].subscribers))
            numbers.append(self._arrivals.number_of[subscriber.frontend, subscriber.request_id])
            positions.append(plan.ends[index])
        token_ids = self._arrivals.made_up.sampled(numbers, positions)
        stop_ids = self._arrivals.stop_ids
        for place, name in enumerate(zip(numbers, positions, strict=True)):
            if name in stop_ids:
                token_ids[place] = stop_ids[name]
        return token_ids
