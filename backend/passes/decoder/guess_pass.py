"""The part of a decoder that guesses further tokens: a pass of its own over the same weights, operations and cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.sampling.sampler import HostSampling

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import PassSpec, StepBatch
    from penstock.backend.passes.decoder.model import DecoderModel
    from penstock.backend.passes.ops.cpu_interface import CpuOps
    from penstock.backend.passes.ops.state_ops import MtpOps
    from penstock.backend.sampling.sampler import IRowSampler

MAX_GUESSED_ROWS = 4


class GuessPass(HostSampling):
    """Implements what a draft model calls of `IBatchedForwardPass`, see `IGuessesTokens`. Its slots are its own."""

    def __init__(
        self,
        spec: PassSpec,
        ops: CpuOps,
        model: DecoderModel,
        make_sampler: Callable[[int], IRowSampler],
        mtp: MtpOps,
    ) -> None:
        super().__init__(spec.vocab_size, MAX_GUESSED_ROWS, make_sampler(MAX_GUESSED_ROWS))
        self.spec = spec
        self._ops, self._model, self._mtp = ops, model, mtp

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        kept, first = self._mtp.kept, self._mtp.first_guess
        for slot, own in batch.state_restores:
            kept[first + own] = kept[slot]
        step = self._ops.begin_step(batch, self.begin_step(batch))
        logits = self._ops.run_step(step, self._model.guess, needs_logits=True)
        if logits is None:
            raise RuntimeError("guesses have no logits; this is a bug")
        return logits

    def close(self) -> None:
        """The pass that made it owns everything."""
