"""The formats of a checkpoint's linears, whichever file declares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Rule:
    """Linears with the same format. covers receives the name of a linear's module."""

    format: MatrixFormat
    covers: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """The first rule that covers a linear applies. Without one its weights are plain floats."""

    rules: tuple[Rule, ...] = ()
    cover_embedding: bool = False
    """Whether rules apply to the embedding too."""
    rounds_rows: bool = False
    """Whether the checkpoint intends 8-bit activations, of the weights' kind, in the products of all these linears."""

    marker: str | None = None
    """Matrices are quantised if they have this part in the files. None if linears alone are, and the files need not be
    asked."""

    def of(self, weight: str) -> MatrixFormat | None:
        """The format of a linear, by the name of its weight; None for plain floats."""
        module = weight.removesuffix(_WEIGHT)
        return next((rule.format for rule in self.rules if rule.covers(module)), None)


PLAIN = StoredFormats()
