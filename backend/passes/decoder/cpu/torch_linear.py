"""Linear layers on the CPU with weights packed once, in the block layout that oneDNN's matrix products want.

F.linear re-packs a plain weight at every call, which costs a decode step three times its products. The two operators
used here are those that torch's own compiler emits; where a build lacks them, F.linear takes over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_HINT = 32
"""Rows for which oneDNN chooses the layout. Measured over 1 … 512 rows: 32 is best or within noise of it for bf16 and
fp32, while hints far above it make small fp32 batches 30 times slower."""


def _has_packing(dtype: torch.dtype) -> bool:
    """oneDNN packs bf16 only on CPUs whose vector unit knows it: not on those with AVX2 alone."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x [n, in] → x @ weight.T + bias, [n, out]. The plain weight is not kept where packing works."""

    weight: Tensor
    bias: Tensor | None
    packed: bool

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if not _has_packing(weight.dtype):
            return PackedLinear(weight.contiguous(), bias, False)
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BATCH_HINT)
        return PackedLinear(reordered, bias, True)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self.weight, self.bias)
