"""Drafts that the simulator draws: often the tokens that will be sampled, often others; or those of a draft model, of
the text and of earlier texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.engine.steps.draft_desk import DraftDesk
from penstock.backend.engine.steps.draft_model import DraftModel, num_spare_pages
from penstock.backend.engine.steps.model_drafting import ModelDrafting
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import StepOutput
from penstock.backend.kv_cache.earlier_texts import EarlierTexts
from penstock.backend.scheduling.drafting import MAX_DRAFTS, MAX_STATE_DRAFTS, Drafting, may_have_drafts
from tests.simulation.chain_pass import ChainPass

if TYPE_CHECKING:
    from random import Random

    from penstock.backend.forward_pass import StepBatch, TokenMasks
    from penstock.backend.scheduling.scheduler import Scheduler
    from penstock.backend.sequences.sequence import Sequence
    from tests.simulation.chain_pass import PassSizes
    from tests.simulation.device import SimulatedExecutor
    from tests.simulation.world import World


class SimulatedDrafting(Drafting):
    """Knows the tokens of each request beforehand."""

    def __init__(self, world: World, rng: Random) -> None:
        has_states = world.setup.num_checkpoints is not None
        super().__init__(StepTiming(), max_drafts=MAX_STATE_DRAFTS if has_states else MAX_DRAFTS)
        self._world, self._rng = world, rng

    def choose(self, decodes: list[Sequence]) -> dict[Sequence, list[int]]:
        drafts, left = {}, self.max_drafts
        for sequence in decodes:
            count = min(self._rng.randint(0, 6), sequence.max_total_tokens - 1 - sequence.num_computed, left)
            if count > 0 and may_have_drafts(sequence) and self._rng.random() < 0.7:
                drafts[sequence] = [self._draw(sequence, sequence.num_computed + n) for n in range(count)]
                left -= count
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


class SimulatedModelDrafting(ModelDrafting):
    """Wants and takes any number of guesses."""

    def __init__(self, world: World, rng: Random) -> None:
        texts = EarlierTexts(world.setup.num_pages, world.setup.page_size)
        super().__init__(StepTiming(), texts, world.setup.context - rng.choice((0, 0, 8)))
        self._world, self._rng = world, rng

    def _best_length(self, num_rows: int, rows: list[Sequence]) -> int:
        return self._rng.randint(0, 6)

    def _best_count(self, num_rows: int, chances: list[float]) -> int:
        return self._rng.randint(0, len(chances))

    def note_guessed(self, num_passes: int, seconds: float) -> None:
        super().note_guessed(num_passes, seconds)
        self._world.covered["asked the draft model"] += 1


class DraftChainPass(ChainPass):
    """The target's chain, with some other tokens and some unlikely ones."""

    def sample(self, logits: list[int], batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        output = super().sample(logits, batch, masks).wait()
        if output.logprobs is None:
            return output
        ids = np.where(output.token_ids % 5 == 0, (output.token_ids + 1) % self.spec.vocab_size, output.token_ids)
        chosen = np.where(output.logprobs.ranks % 7 == 0, np.float32(-9.0), np.float32(0.0))
        return StepOutput(ids.astype(np.int32), replace(output.logprobs, chosen=chosen))


def make_drafting(world: World) -> Drafting | None:
    """None, drafts that are drawn, or a draft model's."""
    if not world.setup.has_drafts:
        return None
    has_model = world.setup.has_draft_model
    return (SimulatedModelDrafting if has_model else SimulatedDrafting)(world, world.more_rng)


def make_desk(
    world: World, drafting: Drafting | None, sizes: PassSizes, executor: SimulatedExecutor, scheduler: Scheduler
) -> DraftDesk | None:
    """None without a draft model."""
    if not isinstance(drafting, ModelDrafting):
        return None
    vocab_size, num_pages = world.setup.model.vocab_size, sizes.num_pages + num_spare_pages(sizes.page_size)
    its_sizes = replace(sizes, num_pages=num_pages, num_host_pages=0, max_running=4, runs_ahead=False, adapters=())
    draft_pass: Any = DraftChainPass(vocab_size, its_sizes)  # it has what a draft model calls
    model = DraftModel(draft_pass, sizes.num_pages, sizes.page_size, sizes.max_batch_tokens)
    return DraftDesk(model, executor, drafting, scheduler.next_decodes, vocab_size)
