"""A step's results, tokens and log probabilities: one block of device memory, and its copy to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.forward_pass import StepOutput, TokenLogprobs
from penstock.backend.passes.decoder.cuda.device.device import annotate_faults
from penstock.backend.passes.decoder.cuda.device.transfers import Downlink, aligned
from penstock.backend.passes.decoder.cuda.step.device_sampler import LogprobBuffers

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.passes.decoder.cuda.device.device import Device
    from penstock.backend.passes.decoder.cuda.device.transfers import Ints, PendingCopy
    from penstock.backend.passes.decoder.cuda.step.device_sampler import SamplerFeatures

MAX_TOP_LOGPROBS = 20
"""Most top log probabilities per token; the API's limit."""


class ResultBuffers:
    """The next step overwrites the device block; a copy made by `fetch` belongs to its step."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self._device = device
        self._downlink = Downlink(device, self.num_bytes(max_rows) // 4)

    @staticmethod
    def num_bytes(max_rows: int) -> int:
        """Return the bytes of device memory."""
        return 4 * (aligned(max_rows) + max_rows * (2 + 2 * MAX_TOP_LOGPROBS))

    def tokens(self, num_rows: int) -> Tensor:
        """int32 [num_rows]"""
        return self._downlink.block[:num_rows]

    def logprobs(self, num_rows: int, features: SamplerFeatures) -> LogprobBuffers:
        """Return buffers for `features.logprob_rows`. Raises ValueError for too many top log probabilities."""
        count, top = len(features.logprob_rows), features.num_top
        if top > MAX_TOP_LOGPROBS:
            raise ValueError(f"{top} top log probabilities are requested; at most {MAX_TOP_LOGPROBS} are allowed")
        sizes = [count, count, count * top, count * top]
        chosen, ranks, ids, values = torch.split(self._downlink.block[aligned(num_rows) :][: sum(sizes)], sizes)
        return LogprobBuffers(
            chosen.view(torch.float32), ranks, ids.view(count, top), values.view(torch.float32).view(count, top)
        )

    def fetch(self, num_rows: int, features: SamplerFeatures, doing: str) -> PendingTokens:
        """Start to copy the results of the last launched step; doing names the step in error messages."""
        num_ints = num_rows
        if len(features.logprob_rows):
            num_ints = aligned(num_rows) + len(features.logprob_rows) * (2 + 2 * features.num_top)
        return PendingTokens(self._device, self._downlink.fetch(num_ints), num_rows, features, doing)


class PendingTokens:
    """See `PendingOutput`."""

    def __init__(
        self, device: Device, fetched: PendingCopy, num_rows: int, features: SamplerFeatures, doing: str
    ) -> None:
        self._device = device
        self._fetched = fetched
        self._num_rows = num_rows
        self._features = features
        self._doing = doing

    def wait(self) -> StepOutput:
        """Call once."""
        with annotate_faults(self._device, self._doing):
            ints = self._fetched.wait()
        tokens = ints[: self._num_rows]
        if not len(self._features.logprob_rows):
            return StepOutput(tokens)
        return StepOutput(tokens, self._logprobs(tokens, ints[aligned(self._num_rows) :]))

    def _logprobs(self, tokens: Ints, ints: Ints) -> TokenLogprobs | None:
        rows, top = self._features.logprob_rows, self._features.num_top
        count = len(rows)
        chosen, ranks, ids, values = np.split(ints, np.cumsum([count, count, count * top]))
        sampled = np.flatnonzero(tokens[rows] >= 0)
        if not len(sampled):
            return None
        return TokenLogprobs(
            rows[sampled],
            chosen.view(np.float32)[sampled],
            ranks[sampled],
            ids.reshape(count, top)[sampled],
            values.view(np.float32).reshape(count, top)[sampled],
        )
