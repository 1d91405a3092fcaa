"""Linear layers in torch with weights packed once, in the block layout of oneDNN's matrix products.

F.linear packs an unpacked weight again at every call, which takes three times as long as a decode step's products.
Torch's own compiler emits the two operators used here; on a build without them, F.linear is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_BATCH_HINT = 32
"""The number of rows that oneDNN optimises the layout for. Measured over 1 … 512 rows: 32 is the best, or within noise
of it, for bf16 and fp32. Much larger hints make small fp32 batches 30 times slower."""


def _has_packing(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs this dtype. It packs bf16 only on CPUs with bf16 instructions, so not with AVX2 alone."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x [n, in] → (x @ weight.T + bias) × scale, [n, out]. Does not keep the unpacked weight where packing works."""

    weight: Tensor
    bias: Tensor | None
    packed: bool
    scale: float = 1.0
    is_gated: bool = False
    """Its outputs are [gate | up]."""

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if not _has_packing(weight.dtype):
            return PackedLinear(weight.contiguous(), bias, False)
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BATCH_HINT)
        return PackedLinear(reordered, bias, True)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        else:
            product = functional.linear(x, self.weight, self.bias)
        return product if self.scale == 1.0 else product * self.scale  # type: ignore[no-any-return]
