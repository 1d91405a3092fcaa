"""The CUDA pass on a machine without a GPU, under names that `find_forward_pass` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from tests.decoder.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from backend.forward_pass import PassOptions, StepBatch


class EmulatedCudaPass(CudaDecoderPass):
    """`device` is the pass's own."""

    device: EmulatedDevice

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> EmulatedCudaPass:  # type: ignore[override]
        device = EmulatedDevice()
        loaded = super().load(model_dir, options, device)
        assert isinstance(loaded, cls)
        loaded.device = device
        return loaded


POISON = 13
"""A token of which `PoisonedCudaPass` is ill."""


class PoisonedCudaPass(EmulatedCudaPass):
    """A step that has the token POISON is an illegal access, after which the device answers no more."""

    def forward(self, batch: StepBatch) -> Tensor:
        logits = super().forward(batch)
        if POISON in batch.input_ids:
            self.device.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        return logits
