"""The masks of a step: which tokens each constrained row may sample. The executor calls this just before `sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backend.forward_pass import TokenMasks
from penstock.backend.structured_output.constraints import ConstraintFailed

if TYPE_CHECKING:
    from penstock.backend.structured_output.constraints import SequenceConstraints, TokenBits
    from penstock.backend.structured_output.late_masks import LateMasks


class StepMasks(NamedTuple):
    """The masks of a step. Rows are indices into the step's logit rows."""

    masks: TokenMasks | None
    faults: dict[int, str]
    """Row → why its constraints failed. It has no mask."""
    late: frozenset[int]
    """Rows whose mask is not ready. They have no mask, and their sampled token does not count."""


def fill_masks(
    rows: list[tuple[int, int, SequenceConstraints]], vocab_size: int, late_masks: LateMasks | None = None
) -> StepMasks:
    """rows are (index into the step's logit rows, tokens generated so far, constraints), ascending.

    Without late_masks all masks are filled here, however long they take.
    """
    bits = np.empty((len(rows), -(-vocab_size // 32)), np.uint32)
    filled: list[int] = []
    faults: dict[int, str] = {}
    late: list[int] = []
    for row, num_generated, constraints in rows:
        if late_masks is not None and not late_masks.is_ready(constraints, num_generated):
            late.append(row)
            continue
        try:
            _fill(bits[len(filled)], num_generated, constraints)
        except ConstraintFailed as error:
            faults[row] = str(error)
        else:
            filled.append(row)
    masks = TokenMasks(np.array(filled, np.int32), bits[: len(filled)]) if filled else None
    return StepMasks(masks, faults, frozenset(late))


def _fill(mask: TokenBits, num_generated: int, constraints: SequenceConstraints) -> None:
    """Raises ConstraintFailed."""
    late, constraints.late = constraints.late, None
    if late is None:
        for token_id in constraints.take_backlog():
            constraints.advance(token_id)
        constraints.rewind(num_generated)
        constraints.fill_mask(mask)
    elif late.mask is not None:
        mask[:] = late.mask
    else:
        raise ConstraintFailed(late.failure)
