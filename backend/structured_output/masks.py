"""The masks of a step: which tokens each constrained row may sample. The executor calls this just before `sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import TokenMasks
from penstock.backend.structured_output.constraints import ConstraintFailed

if TYPE_CHECKING:
    from penstock.backend.structured_output.constraints import SequenceConstraints


def fill_masks(
    rows: list[tuple[int, int, SequenceConstraints]], vocab_size: int
) -> tuple[TokenMasks | None, dict[int, str]]:
    """Return the step's masks, and the reason for each row whose constraints failed.

    rows are (index into the step's logit rows, tokens generated so far, constraints), ascending. A failed row has no
    mask; its reason is found under its index.
    """
    bits = np.empty((len(rows), -(-vocab_size // 32)), np.uint32)
    filled: list[int] = []
    faults: dict[int, str] = {}
    for row, num_generated, constraints in rows:
        constraints.rewind(num_generated)
        try:
            constraints.fill_mask(bits[len(filled)])
        except ConstraintFailed as error:
            faults[row] = str(error)
        else:
            filled.append(row)
    if not filled:
        return None, faults
    return TokenMasks(np.array(filled, np.int32), bits[: len(filled)]), faults
