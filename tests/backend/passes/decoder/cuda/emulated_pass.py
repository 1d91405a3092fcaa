"""The CUDA pass on a machine without a GPU, under names that `find_forward_pass` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda.launch.launcher import KernelFailed
from tests.backend.passes.decoder.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from penstock.backend.forward_pass import PassOptions, StepBatch
    from penstock.backend.passes.decoder.cuda.launch.launcher import Kernel


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


POISON, GREED = 13, 17
"""Tokens of which `FaultyCudaPass` is ill."""


class FaultyCudaPass(EmulatedCudaPass):
    """A step that has the token POISON is an illegal access, after which the device answers no more; for one that has
    GREED there is no memory."""

    def _forward(self, batch: StepBatch) -> Tensor:
        logits = super()._forward(batch)
        if GREED in batch.input_ids:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if POISON in batch.input_ids:
            self.device.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        return logits


class UncompiledCudaPass(EmulatedCudaPass):
    """Its kernels do not compile."""

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> EmulatedCudaPass:  # type: ignore[override]
        loaded = super().load(model_dir, options)
        loaded.device.launcher.prepare = _fail_to_compile  # type: ignore[method-assign]
        return loaded


def _fail_to_compile(kernels: Iterable[Kernel]) -> None:
    raise KernelFailed(f"{next(iter(kernels))} cannot be compiled: no such header\nand more")
