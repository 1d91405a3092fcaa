"""A model's weights on the device, in the form that the operations read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.ops.matmul import CudaLinear
from penstock.backend.passes.decoder.cuda.ops.packed_weights import takes_packed

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight
    from penstock.backend.passes.decoder.cuda.ops.packed_weights import CudaQuantizedLinear
    from penstock.backend.passes.decoder.cuda.ops.quantized_linear import QuantizedProducts


class DeviceWeights:
    """The weight methods of `Ops`. Products read matrices in dtype, or quantised; norms read vectors in fp32."""

    def __init__(self, torch_device: torch.device, dtype: torch.dtype, quantized: QuantizedProducts) -> None:
        self._torch_device = torch_device
        self._dtype = dtype
        self._quantized = quantized

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> CudaLinear | CudaQuantizedLinear:
        placed_bias = None if bias is None else self.table(bias)
        if not isinstance(weight, torch.Tensor):
            if takes_packed(self._dtype):
                return self._quantized.pack(weight, placed_bias, scale, is_gated=is_gated)
            weight = weight.dequantize()
        placed = self.table(weight)
        return CudaLinear(placed, placed.t(), placed_bias, scale, is_gated)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.to(self._torch_device, torch.float32).contiguous()

    def table(self, weight: Tensor) -> Tensor:
        return weight.to(self._torch_device, self._dtype).contiguous()

    def tied_table(
        self,
        weight: Tensor | QuantizedWeight,  # noqa: ARG002 - one copy serves both
        lm_head: CudaLinear | CudaQuantizedLinear,
    ) -> Tensor | CudaQuantizedLinear:
        return lm_head.weight if isinstance(lm_head, CudaLinear) else lm_head
