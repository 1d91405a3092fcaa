"""The CUDA pass on the emulator, under names that `find_forward_pass` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.cuda.device.launcher import KernelFailed
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from penstock.backend.forward_pass import PassOptions, StepBatch
    from penstock.backend.passes.cuda.device.launcher import Kernel


class EmulatedCudaPass(CudaDecoderPass):
    """Each pass has its own `device`."""

    device: EmulatedDevice

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> EmulatedCudaPass:  # type: ignore[override]
        device = EmulatedDevice()
        loaded = super().load(model_dir, options, device)
        assert isinstance(loaded, cls)
        loaded.device = device
        return loaded

    @classmethod
    def shared_bytes(cls, model_dir: Path, options: PassOptions) -> int:  # type: ignore[override]
        return super().shared_bytes(model_dir, options, EmulatedDevice().uuid)


FAULT_TOKEN, OUT_OF_MEMORY_TOKEN = 13, 17
"""Tokens that make a step of `FaultyCudaPass` fail."""


class FaultyCudaPass(EmulatedCudaPass):
    """Two tokens make a step fail: FAULT_TOKEN is an illegal access, after which the device no longer answers;
    OUT_OF_MEMORY_TOKEN is a failed allocation."""

    def _forward(self, batch: StepBatch) -> Tensor:
        logits = super()._forward(batch)
        if OUT_OF_MEMORY_TOKEN in batch.input_ids:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if FAULT_TOKEN in batch.input_ids:
            self.device.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        return logits


class UncompiledCudaPass(EmulatedCudaPass):
    """A pass whose kernels do not compile."""

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> EmulatedCudaPass:  # type: ignore[override]
        loaded = super().load(model_dir, options)
        loaded.device.launcher.prepare = _fail_to_compile  # type: ignore[method-assign]
        return loaded


def _fail_to_compile(kernels: Iterable[Kernel]) -> None:
    raise KernelFailed(f"{next(iter(kernels))} cannot be compiled: no such header\nand more")
