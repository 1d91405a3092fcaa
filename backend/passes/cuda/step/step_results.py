"""A step's results, tokens and log probabilities: one block of device memory, and its copy to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from penstock.backend.forward_pass import StepBatch, StepOutput, TokenLogprobs
from penstock.backend.passes.cuda.device.device import Device, explain_fault
from penstock.backend.passes.cuda.device.transfers import Downlink, Ints, PendingCopy, aligned
from penstock.backend.passes.cuda.step.device_sampler import LogprobBuffers

MAX_TOP_LOGPROBS = 20
"""Most top log probabilities per token; the API's limit."""
MAX_NAMED_LOGPROBS = 128
"""Most log probabilities per sampled token when the request names the tokens; the API's limit."""


@dataclass(frozen=True, slots=True)
class LogprobPlace:
    """The places of the log probabilities of `count` tokens in the block: four columns, each contiguous."""

    start: int
    count: int
    num_top: int

    @property
    def sizes(self) -> list[int]:
        return [self.count, self.count, self.count * self.num_top, self.count * self.num_top]

    @property
    def end(self) -> int:
        return self.start + sum(self.sizes)


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """The block's contents in one step: a token of each row; with drafts one of each draft, and how many each row
    accepts; then log probabilities of sampled and of scored tokens."""

    num_rows: int
    drafts: Ints | None
    """`StepBatch.drafts`"""
    sampled: LogprobPlace
    scored: LogprobPlace

    @property
    def num_ints(self) -> int:
        if self.scored.count:
            return self.scored.end
        return self.sampled.end if self.sampled.count else self.accepted.stop

    @property
    def accepted(self) -> slice:
        """[num_rows], void for rows without drafts; empty if no row has any."""
        if self.drafts is None:
            return slice(self.num_rows, self.num_rows)
        start = self.num_rows + int(self.drafts.sum())
        return slice(start, start + self.num_rows)


@lru_cache(1 << 10)
def _layout(num_rows: int, num_ints: int, sampled: tuple[int, int], scored: tuple[int, int]) -> ResultLayout:
    """num_ints: before log probabilities."""
    of_sampled = LogprobPlace(aligned(num_ints), *sampled)
    return ResultLayout(num_rows, None, of_sampled, LogprobPlace(aligned(of_sampled.end), *scored))


class ResultBuffers:
    """The next step overwrites the device block; a copy made by `fetch` belongs to its step."""

    def __init__(self, device: Device, max_rows: int, max_tokens: int, max_verified: int) -> None:
        """max_verified: most rows and drafts of a step with drafts."""
        self._device = device
        self._downlink = Downlink(device, self.num_bytes(max_rows, max_tokens, max_verified) // 4 - max_rows)
        self.row_numbers = torch.arange(max_rows, dtype=torch.int32, device=device.torch_device)
        """int32 [max_rows]: 0, 1, 2 …"""

    @staticmethod
    def num_bytes(max_rows: int, max_tokens: int, max_verified: int) -> int:
        """Return the bytes of device memory."""
        tokens = max(max_rows, 2 * max_verified)
        sampled = max_rows * (2 + 2 * MAX_NAMED_LOGPROBS)
        scored = max_tokens * (2 + 2 * MAX_TOP_LOGPROBS)
        return 4 * (aligned(tokens) + aligned(sampled) + scored + max_rows)

    def lay_out(self, batch: StepBatch, sampled: tuple[int, int], scored: tuple[int, int]) -> ResultLayout:
        """sampled and scored: the number of tokens, and of further log probabilities for each. Raises ValueError for
        too many of these."""
        for (_, top), most in ((sampled, MAX_NAMED_LOGPROBS), (scored, MAX_TOP_LOGPROBS)):
            if top > most:
                raise ValueError(f"{top} log probabilities are requested; at most {most} are allowed")
        num_rows: int = batch.logit_rows.shape[0]
        if batch.drafts is None:
            return _layout(num_rows, num_rows, sampled, scored)
        num_ints = 2 * num_rows + int(batch.drafts.sum())
        return replace(_layout(num_rows, num_ints, sampled, scored), drafts=batch.drafts)

    def ints(self, part: slice) -> Tensor:
        """int32: tokens, or `ResultLayout.accepted`."""
        return self._downlink.block[part]

    def logprobs(self, place: LogprobPlace) -> LogprobBuffers:
        count, top = place.count, place.num_top
        chosen, ranks, ids, values = torch.split(self._downlink.block[place.start : place.end], place.sizes)
        return LogprobBuffers(
            chosen.view(torch.float32), ranks, ids.view(count, top), values.view(torch.float32).view(count, top)
        )

    def fetch(self, layout: ResultLayout, logprob_rows: Ints, doing: Callable[[], str]) -> PendingTokens:
        """Start to copy the results of the last launched step; doing names the step in error messages.

        logprob_rows: `SamplerFeatures.logprob_rows`.
        """
        return PendingTokens(self._device, self._downlink.fetch(layout.num_ints), layout, logprob_rows, doing)


class PendingTokens:
    """Implements `PendingOutput`."""

    def __init__(
        self, device: Device, fetched: PendingCopy, layout: ResultLayout, logprob_rows: Ints, doing: Callable[[], str]
    ) -> None:
        self._device = device
        self._fetched = fetched
        self._layout = layout
        self._logprob_rows = logprob_rows
        self._doing = doing

    def wait(self) -> StepOutput:
        """Call once."""
        try:
            ints = self._fetched.wait()
        except Exception as error:
            explain_fault(self._device, error, self._doing())
            raise
        layout = self._layout
        tokens = ints[: layout.num_rows]
        sampled = scored = None
        if layout.sampled.count:
            sampled = self._of_sampled(tokens, _read(ints, layout.sampled, self._logprob_rows))
        if layout.scored.count:
            scored = _read(ints, layout.scored, np.arange(layout.scored.count, dtype=np.int32))
        num_accepted = () if layout.drafts is None else (ints[layout.accepted] * (layout.drafts > 0)).tolist()
        return StepOutput(tokens, sampled, scored, num_accepted=tuple(num_accepted))

    @staticmethod
    def _of_sampled(tokens: Ints, logprobs: TokenLogprobs) -> TokenLogprobs | None:
        """Log probabilities of sampled tokens, without the rows that have no token."""
        has_token = np.flatnonzero(tokens[logprobs.rows] >= 0)
        if not len(has_token):
            return None
        return TokenLogprobs(
            logprobs.rows[has_token],
            logprobs.chosen[has_token],
            logprobs.ranks[has_token],
            logprobs.top_ids[has_token],
            logprobs.top[has_token],
        )


def _read(ints: Ints, place: LogprobPlace, rows: Ints) -> TokenLogprobs:
    chosen, ranks, ids, values = np.split(ints[place.start : place.end], np.cumsum(place.sizes[:-1]))
    shape = place.count, place.num_top
    return TokenLogprobs(
        rows, chosen.view(np.float32), ranks, ids.reshape(shape), values.view(np.float32).reshape(shape)
    )
