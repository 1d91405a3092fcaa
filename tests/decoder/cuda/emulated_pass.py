"""The CUDA pass on a machine without a GPU, under a name that `find_forward_pass` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from tests.decoder.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from pathlib import Path

    from backend.forward_pass import PassOptions


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
