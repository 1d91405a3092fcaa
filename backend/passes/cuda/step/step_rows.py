"""The rows of one step, as the kernels and the operations see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.forward_pass import EmbeddedTokens


@dataclass(frozen=True, slots=True)
class RowArrays:
    """The rows of a step, as kernels read them: views of the device's step block."""

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
    """The rows of one step on the device. All counts include padding."""

    num_tokens: int
    rows: RowArrays
    decode_rows: RowArrays
    """The rows of one token; they come first. In a captured step, rows of several tokens are padding here."""
    prefill_tiles: Tensor | None
    """The result of `StepAttention.tiles`, with padding; None if there are no tiles."""
    logit_rows: RowArrays
    logit_tokens: Tensor
    is_decode_only: bool
    """Every row has one token and needs its logits."""
    is_scored: bool = False
    """Tokens are scored: the last layer computes all tokens, like the layers before it."""
    rope_positions: Tensor | None = None
    """`StepBatch.rope_positions`, flat, also of text; None for models whose pictures have no axes."""
    embeddings: tuple[EmbeddedTokens, ...] = ()
    """Those that the first layers add to, see `PassSpec.picture_layers`; no captured step has any."""
    visible_ends: Tensor | None = None
    """As in StepBatch; no captured step has them."""
    adapters: Tensor | None = None
    """int32 [num_tokens], -1 for none; None if no token has one."""
