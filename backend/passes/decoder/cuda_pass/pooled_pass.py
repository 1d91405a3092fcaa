"""PooledCudaPass: a decoder on a GPU that returns vectors or scores of sequences instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.forward_pass import StepOutput
from penstock.backend.passes.cuda.device.device import annotate_faults
from penstock.backend.passes.cuda.device.transfers import Downlink
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass, step_name
from penstock.backend.passes.decoder.spec import WeightsWithHead, pooled_spec

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from penstock.backend.checkpoint.encoders.pooled_decoder import PooledDecoder
    from penstock.backend.forward_pass import PassOptions, PassSpec, StepBatch, TokenMasks
    from penstock.backend.passes.cuda.device.device import Device
    from penstock.backend.passes.cuda.device.transfers import PendingCopy
    from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory
    from penstock.backend.passes.decoder.cuda_pass.workspace_plan import PassSettings
    from penstock.backend.passes.ops.interface import Weights


class PooledCudaPass(CudaDecoderPass):
    """The handle between `forward` and `sample` is the results of the pooled rows, on the device.

    They are computed where logits are, so rows of one token replay the same graphs.
    """

    def __init__(
        self,
        pooled: PooledDecoder,
        weights: Weights,
        device: Device,
        settings: PassSettings,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(pooled.config, weights, device, *settings, memory=memory)
        self._gives_hidden_states = pooled.head == "embed"
        self._spec = _with_results(self._spec, pooled, settings.sizes.max_rows)
        self._vectors = Downlink(device, settings.sizes.max_rows * pooled.width)

    @classmethod
    def describe_pooled(cls, model_dir: Path, options: PassOptions, pooled: PooledDecoder) -> PassSpec:
        from penstock.backend.passes.decoder.cuda_pass.loading import describe_checkpoint

        return _with_results(describe_checkpoint(model_dir, pooled.config, options), pooled, options.max_running)

    @classmethod
    def load_pooled(
        cls, model_dir: Path, options: PassOptions, pooled: PooledDecoder, device: Device
    ) -> PooledCudaPass:
        from penstock.backend.checkpoint.encoders.decoder_heads import read_head
        from penstock.backend.passes.decoder.cuda_pass.loading import load_pass

        head = read_head(model_dir, pooled)

        def build(weights: Weights, settings: PassSettings, memory: DeviceMemory) -> PooledCudaPass:
            return cls(pooled, WeightsWithHead(weights, head), device, settings, memory)

        return load_pass(model_dir, pooled.config, options, device, build)

    def _forward(self, batch: StepBatch) -> Tensor:
        """[Q, width]. Slots need no sampler's state. Without pooled rows, batch.logit_rows are those of the warm-up."""
        rows = batch.logit_rows if batch.pooled is None else batch.pooled.rows
        scores = super()._forward(replace(batch, logit_rows=rows, slot_inits=(), pooled=None))
        return self._last_normed(len(rows)) if self._gives_hidden_states else scores

    def _sample(self, logits: Tensor, batch: StepBatch, masks: TokenMasks | None) -> PendingVectors:  # noqa: ARG002 - nothing is sampled
        link, shape = self._vectors, (logits.shape[0], logits.shape[1])
        link.block.view(torch.float32)[: logits.numel()].view(shape).copy_(logits)
        return PendingVectors(self._device, link.fetch(logits.numel()), shape, step_name(batch))

    def close(self) -> None:
        self._device.synchronize()
        del self._vectors
        super().close()


@dataclass(frozen=True, slots=True)
class PendingVectors:
    """Implements `PendingOutput`."""

    device: Device
    fetched: PendingCopy
    shape: tuple[int, int]
    doing: str

    def wait(self) -> StepOutput:
        """Call once."""
        with annotate_faults(self.device, self.doing):
            vectors = self.fetched.wait().view(np.float32).reshape(self.shape)
        return StepOutput(np.empty(0, np.int32), pooled=tuple(vectors) if len(vectors) else None)


def _with_results(spec: PassSpec, pooled: PooledDecoder, max_rows: int) -> PassSpec:
    results_bytes = 4 * max_rows * pooled.width
    return replace(pooled_spec(spec, pooled), workspace_bytes=spec.workspace_bytes + results_bytes)
