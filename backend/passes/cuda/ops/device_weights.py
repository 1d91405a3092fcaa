"""A model's weights on the device, in the form that the operations read."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory, PrivateMemory
from penstock.backend.passes.cuda.ops.matmul import CudaLinear
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts


class DeviceWeights:
    """The weight methods of `Ops`. Products read matrices in dtype, or quantised; norms read vectors in fp32."""

    def __init__(
        self,
        torch_device: torch.device,
        dtype: torch.dtype,
        quantized: QuantizedProducts,
        memory: DeviceMemory | None = None,
    ) -> None:
        """memory holds weights that are not quantised; by default it is this process's own."""
        self._memory = memory or PrivateMemory()
        self._torch_device = torch_device
        self._dtype = dtype
        self._quantized = quantized

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> CudaLinear | CudaQuantizedLinear:
        placed_bias = None if bias is None else self.table(bias)
        packed = self._quantized.take(weight, placed_bias, scale, is_gated=is_gated)
        if packed is not None:
            return packed
        placed = self.table(weight if isinstance(weight, torch.Tensor) else weight.dequantize())
        return CudaLinear(placed, placed.t(), placed_bias, scale, is_gated)

    def vector(self, weight: Tensor) -> Tensor:
        return self._place(weight, torch.float32)

    def table(self, weight: Tensor) -> Tensor:
        return self._place(weight, self._dtype)

    def _place(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self._memory.place(lambda: weight.to(self._torch_device, dtype).contiguous(), weight.shape, dtype)

    def packed_table(
        self,
        weight: Tensor | QuantizedWeight,  # noqa: ARG002 - one copy serves both
        linear: CudaLinear | CudaQuantizedLinear,
    ) -> Tensor | CudaQuantizedLinear:
        return linear.weight if isinstance(linear, CudaLinear) else linear
