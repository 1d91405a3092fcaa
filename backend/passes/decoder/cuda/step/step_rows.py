"""The rows of one step, as the kernels and the operations see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowArrays:
    """The rows of a step for the kernels: views of the device's block."""

    query_starts: Tensor
    """int32 [R + 1]"""
    context_lens: Tensor
    """int32 [R]"""
    slots: Tensor
    """int32 [R]; -1 is padding."""

    def cut(self, num_rows: int) -> RowArrays:
        return RowArrays(self.query_starts[: num_rows + 1], self.context_lens[:num_rows], self.slots[:num_rows])


@dataclass(frozen=True, slots=True)
class CudaStep:
    """One step's rows on the device, and its token count on the host: padding included."""

    num_tokens: int
    rows: RowArrays
    num_decode: int
    """Rows of one token, which come first."""
    prefill_tiles: Tensor | None
    """Of the other rows; see `PrefillAttention`. None where there are none."""
    logit_rows: RowArrays
    logit_tokens: Tensor
    is_decode_only: bool
    """All rows have one token, and all want logits: there is nothing to leave out."""
