"""A model's weights on the device, in the form that the operations read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.ops.matmul import CudaLinear

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight


class DeviceWeights:
    """The weight methods of `Ops`. Products read matrices in dtype; norms read vectors in fp32."""

    def __init__(self, torch_device: torch.device, dtype: torch.dtype) -> None:
        self._torch_device = torch_device
        self._dtype = dtype

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> CudaLinear:
        if not isinstance(weight, torch.Tensor):
            raise TypeError("quantised weights are for the CPU")
        placed = self.table(weight)
        return CudaLinear(placed, placed.t(), None if bias is None else self.table(bias), scale, is_gated)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.to(self._torch_device, torch.float32).contiguous()

    def table(self, weight: Tensor) -> Tensor:
        return weight.to(self._torch_device, self._dtype).contiguous()

    def tied_table(self, weight: Tensor | QuantizedWeight, lm_head: CudaLinear) -> Tensor:  # noqa: ARG002 - one copy serves both
        return lm_head.weight
