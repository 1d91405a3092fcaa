"""The plan of one step, and how its tokens are divided among prompts. Its rows are stored as columns, so that hundreds
of rows cost little Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from penstock.backend.sequences.sequence import Sequence

Chunk: TypeAlias = tuple[Sequence, int]
"""A sequence with known tokens that are not computed, and how many of them the step computes."""


_Entry = TypeVar("_Entry")
NO_SAMPLE = -2
"""In a list of sampled tokens by row: the row samples no token."""


class PlanRow(NamedTuple):
    """A sequence's part of one step: the tokens at positions start … end - 1."""

    sequence: Sequence
    generation: int
    start: int
    end: int
    samples: bool
    """The row includes the sequence's last known token, so the step samples the next one."""
    needs_slot_init: bool
    """The first row since the sequence got its slot, or since it was rewound."""


@dataclass(slots=True)
class Plan:
    """Columns with one entry per row. Rows of one token come first."""

    sequences: list[Sequence] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    """A row counts while its sequence has this generation and has not stopped in it."""
    slots: list[int | None] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Tokens whose KV is computed after the step; the row computes the last `lengths` of them."""
    lengths: list[int] = field(default_factory=list)
    num_decodes: int = 0
    """Number of first rows that compute the token that their slot sampled last, and sample the next one."""
    logit_rows: list[int] = field(default_factory=list)
    """Indices of the rows that sample, ascending."""
    slot_init_sequences: list[Sequence] = field(default_factory=list)
    """Sequences newly assigned a slot, or rewound. For the batch builder."""
    grown: list[Sequence] = field(default_factory=list)
    """Sequences that have more pages than in the step before. For the batch builder."""
    page_copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """(source, destination) pages of sequences that begin within a copied page."""
    page_restores: dict[Sequence, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """(host place, page) pairs of sequences that begin with offloaded pages."""
    state_restores: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """(checkpoint, slot) of sequences that go on from a checkpoint."""
    state_saves: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """(slot, checkpoint) of sequences whose state after the step is kept."""
    scored: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    """(first, end) positions of prompts whose next token is scored, in the order of the rows."""
    pooled_rows: list[int] = field(default_factory=list)
    """Indices of the rows that complete a vector, ascending."""
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Guesses of the tokens after those in `ends`, which the step computes and verifies too. Not counted in `lengths`.
    Their rows follow the first num_decodes, and begin with the token that their slot sampled last."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) + sum(map(len, self.drafts.values()))

    def __len__(self) -> int:
        return len(self.sequences)

    def live_rows(self) -> list[int]:
        """Indices of the rows whose sequence has not ended, restarted or sampled its last token since planning."""
        return [
            index
            for index, (sequence, generation) in enumerate(zip(self.sequences, self.generations, strict=True))
            if sequence.generation == generation != sequence.stopped_generation
        ]

    def keep(self, kept: list[int]) -> Plan:
        """The plan with only the rows of these ascending indices."""
        samplers, pooled = set(self.logit_rows), set(self.pooled_rows)
        sequences = [self.sequences[index] for index in kept]
        return Plan(
            sequences,
            [self.generations[index] for index in kept],
            [self.slots[index] for index in kept],
            [self.ends[index] for index in kept],
            [self.lengths[index] for index in kept],
            sum(index < self.num_decodes for index in kept),
            [new for new, index in enumerate(kept) if index in samplers],
            self.slot_init_sequences,
            self.grown,
            _only(sequences, self.page_copies),
            _only(sequences, self.page_restores),
            _only(sequences, self.state_restores),
            _only(sequences, self.state_saves),
            _only(sequences, self.scored),
            [new for new, index in enumerate(kept) if index in pooled],
            _only(sequences, self.drafts),
        )

    def rows(self) -> Iterator[PlanRow]:
        """One object per row. Slow: for checks and tests."""
        samplers, slot_inits = set(self.logit_rows), set(self.slot_init_sequences)
        columns = zip(self.sequences, self.generations, self.ends, self.lengths, strict=True)
        for index, (sequence, generation, end, length) in enumerate(columns):
            yield PlanRow(sequence, generation, end - length, end, index in samplers, sequence in slot_inits)


def _only(sequences: list[Sequence], entries: dict[Sequence, _Entry]) -> dict[Sequence, _Entry]:
    return {sequence: entries[sequence] for sequence in sequences if sequence in entries}


_RESERVED_PART = 4
"""A quarter of a step is reserved for short prompts: they finish soon, and long prompts hardly notice."""

# A step has room for a fixed number of tokens, because every stream waits for its end. Decodes come first, with one
# token each. What they leave is this budget, and prompts share it:
#
#   |------------- 3/4 -------------|--- 1/8 ---|--- 1/8 ---|
#    the first prompts, in order     shortest    newcomers
#
# The first part goes to the first prompt, as far as it needs it, and then to the next: many prompts computed in halves
# would bring no token. Without the reserve, a prompt of 100,000 tokens would keep one of ten waiting for all its steps.
# With it the short one starts in the next step, and the long one takes a third longer at most. Newcomers have a part of
# their own, because prompts that run already could use up the reserve of each step.
#
# No token of the budget is wasted while a prompt needs it: what newcomers leave goes back to the running prompts.


def share_out(needs: list[int], budget: int, *, num_of_first_tenant: int, someone_waits: bool) -> tuple[list[int], int]:
    """Return how many tokens of each prompt the step computes, and how many are left for newcomers.

    needs are the prompts' missing tokens, in order. If all fit, all are computed. If not, the first prompts get three
    quarters. The prompts of the first tenant with the fewest missing tokens get the rest; half of it is left for
    newcomers if someone waits. So neither a long prompt nor a short one waits for all others.
    """
    left = budget - sum(needs)
    if left >= 0:
        return needs, left
    reserve = max(1, budget // _RESERVED_PART) if budget > 1 and (someone_waits or len(needs) > 1) else 0
    newcomers = (reserve + 1) // 2 if someone_waits else 0
    grants = [0] * len(needs)
    _grant(grants, needs, range(len(needs)), budget - reserve)
    shortest_first = sorted(range(num_of_first_tenant), key=lambda index: needs[index] - grants[index])
    shortest_first += range(num_of_first_tenant, len(needs))
    _grant(grants, needs, shortest_first, reserve - newcomers)
    return grants, newcomers


def _grant(grants: list[int], needs: list[int], order: range | list[int], budget: int) -> None:
    for index in order:
        grant = min(needs[index] - grants[index], budget)
        grants[index] += grant
        budget -= grant
        if not budget:
            return
