"""Drafts that the simulator draws: often the tokens that will be sampled, often others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.scheduling.drafting import Drafting, may_have_drafts

if TYPE_CHECKING:
    from random import Random

    from penstock.backend.sequences.sequence import Sequence
    from tests.simulation.world import World


class SimulatedDrafting(Drafting):
    """Knows the tokens of each request beforehand."""

    def __init__(self, world: World, rng: Random) -> None:
        super().__init__(StepTiming())
        self._world, self._rng = world, rng

    def choose(self, decodes: list[Sequence]) -> dict[Sequence, list[int]]:
        drafts = {}
        for sequence in decodes:
            count = min(self._rng.randint(0, 6), sequence.max_total_tokens - 1 - sequence.num_computed)
            if count > 0 and may_have_drafts(sequence) and self._rng.random() < 0.7:
                drafts[sequence] = [self._draw(sequence, sequence.num_computed + n) for n in range(count)]
        self._world.covered["drafted"] += bool(drafts)
        return drafts

    def _draw(self, sequence: Sequence, index: int) -> int:
        """The token at this index, or another one."""
        subscriber = next(iter(sequence.subscribers))
        expected = self._world.ask_of(subscriber.frontend, subscriber.request_id).expected
        place = index - sequence.num_prompt_tokens
        if place < len(expected) and self._rng.random() < 0.8:
            return expected[place]
        return self._rng.randrange(self._world.setup.model.vocab_size)
