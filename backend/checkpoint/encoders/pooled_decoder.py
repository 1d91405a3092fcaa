"""A decoder that returns vectors or scores. Reads no file, so a pass can be made without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig

HeadKind: TypeAlias = Literal["embed", "yes or no", "score"]


@dataclass(frozen=True, slots=True)
class PooledDecoder:
    config: DecoderConfig
    """The decoder without lm_head; head_width is set for "yes or no" and "score"."""
    head: HeadKind
    normalizes: bool = False
    """The model's files ask for "embed" to be normalised. The pass leaves it unnormalised."""

    @property
    def width(self) -> int:
        """Values of a vector."""
        return self.config.hidden_size if self.head == "embed" else self.config.head_width

    @property
    def kind(self) -> str:
        """Kind of vector, as in `PooledRows`."""
        return "embed" if self.head == "embed" else "classify"
