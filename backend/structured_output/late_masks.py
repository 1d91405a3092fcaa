"""The masks of a step, and slow masks: a separate thread fills those, while their rows sit out of the steps.

A grammar may be ambiguous, so that a mask takes up to 0.3 s; and a resumed stream comes with tokens that its grammar
has not consumed. Neither may delay the rows of others. Sampled tokens do not depend on it: a late mask is the same
mask, in a later step. One thread fills them all, and tenants take turns for it: a tenant's mask waits for its own
tenant's earlier ones, and for one slice of work of each other tenant.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backend.forward_pass import TokenMasks
from penstock.backend.structured_output.constraints import ConstraintFailed, LateMask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llguidance import LLExecutor, LLMatcher
    from numpy.typing import NDArray

    from penstock.backend.structured_output.constraints import SequenceConstraints, TokenBits

logger = logging.getLogger("penstock.backend")

_SLICE_S = 0.01
"""A sequence with many tokens to consume gives way to the next one after this time."""
_TOO_MANY_TOKENS = 1 << 30


class LateMasks:
    """Owned by the executor, whose threads call it, but never two of them for one sequence at a time.

    The step before has finished when the masks of the next one are filled.
    """

    def __init__(self, vocab_size: int, wake: Callable[[], None]) -> None:
        """wake is called by the thread after each mask: its sequence can be planned again."""
        self._vocab_size = vocab_size
        self._wake = wake
        self._turns = MaskTurns()
        self._work = threading.Condition()
        """Guards _turns."""
        self._thread: threading.Thread | None = None
        self._llguidance: tuple[LLExecutor, LLMatcher] | None = None
        """An executor, and a matcher that takes nothing; see `_consume`."""

    def is_ready(self, constraints: SequenceConstraints, num_tokens: int) -> bool:
        """Whether the mask after num_tokens generated tokens can be filled at once. If not, it is begun here."""
        late = constraints.late
        if late is not None:
            if not late.is_done:  # read once: the thread may set it at any time
                return False
            if late.num_tokens == num_tokens:
                return True
            constraints.late = None  # the sequence was rewound since
        if not constraints.is_late:
            return True
        if constraints.num_tokens >= num_tokens:  # otherwise the row does not count: the step before it has failed
            self._begin(constraints, (), num_tokens)
        return False

    def advance(self, constraints: SequenceConstraints, token_ids: Sequence[int]) -> None:
        """Consume sampled tokens and fill the mask that follows them."""
        self._begin(constraints, token_ids, constraints.num_tokens + len(token_ids))

    def _begin(self, constraints: SequenceConstraints, tokens: Iterable[int], num_tokens: int) -> None:
        constraints.late = late = LateMask(constraints, (*constraints.take_backlog(), *tokens), num_tokens)
        self._put(late)

    def _put(self, late: LateMask) -> None:
        with self._work:
            self._turns.put(late)
            self._work.notify()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="late masks", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._work:
                while (late := self._turns.take()) is None:
                    self._work.wait()
            if not self.work_on(late):
                with self._work:
                    self._turns.put(late)

    def work_on(self, late: LateMask) -> bool:
        """Work for a while; return whether no work is left."""
        constraints = late.constraints()
        if constraints is None:
            return True
        began_s = time.perf_counter()
        try:
            while late.tokens:
                constraints.advance(late.tokens.popleft(), self._consume)
                if time.perf_counter() - began_s > _SLICE_S and late.tokens:
                    return False
            constraints.rewind(late.num_tokens)
            mask = np.empty(-(-self._vocab_size // 32), np.uint32)
            constraints.fill_mask(mask)
            late.mask = mask
        except ConstraintFailed as error:
            late.failure = str(error)
        except Exception as error:  # deliberately broad: without the thread all late rows would wait
            logger.exception("a late mask could not be filled; its request fails")
            late.failure = f"an internal error: {type(error).__name__}"
        late.is_done = True
        self._wake()
        return True

    def _consume(self, matcher: LLMatcher, token_id: int) -> bool:
        """Let matchers consume tokens. `consume_token` holds the GIL; the call for several matchers does not."""
        if self._llguidance is None:
            from llguidance import LLExecutor

            spare = matcher.deep_copy()
            spare.rollback(_TOO_MANY_TOKENS)
            if not spare.is_error():
                raise RuntimeError("a matcher has rolled back more tokens than it has taken in")
            self._llguidance = LLExecutor(1), spare
        executor, spare = self._llguidance
        return executor.consume_token_par([(matcher, token_id), (spare, 0)])[0]


class MaskTurns:
    """Masks that wait to be filled: tenants take turns, each tenant's own are first come, first served.

    Not safe for threads. `CompileTurns` takes turns in the same way, for work that several tenants may wait for and
    that can be cancelled.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, deque[LateMask]] = OrderedDict()
        """Tenants with waiting masks; the next in turn is first."""

    def put(self, late: LateMask) -> None:
        self._waiting.setdefault(late.tenant, deque()).append(late)

    def take(self) -> LateMask | None:
        """The next mask; None if none waits."""
        if not self._waiting:
            return None
        tenant, masks = self._waiting.popitem(last=False)
        late = masks.popleft()
        if masks:
            self._waiting[tenant] = masks
        return late


class StepMasks(NamedTuple):
    """The masks of a step. Rows are indices into the step's logit rows."""

    masks: TokenMasks | None
    faults: dict[int, str]
    """Row → why its constraints failed. It has no mask."""
    late: frozenset[int]
    """Rows whose mask is not ready. They have no mask, and their sampled token does not count."""


class MaskedRow(NamedTuple):
    """A row that samples under constraints."""

    row: int
    """Index into the step's logit rows."""
    num_generated: int
    constraints: SequenceConstraints
    positions: Sequence[int]
    """Values for `TokenMasks.rows`: the position of the next token, then of the token after each draft."""
    drafts: Sequence[int] = ()


def fill_masks(rows: list[MaskedRow], vocab_size: int, late_masks: LateMasks | None = None) -> StepMasks:
    """Fill the masks of a step's rows, ascending. Without late_masks all are filled here, however long they take."""
    bits = np.empty((sum(len(row.positions) for row in rows), -(-vocab_size // 32)), np.uint32)
    filled: list[int] = []
    faults: dict[int, str] = {}
    late: list[int] = []
    for row, num_generated, constraints, positions, drafts in rows:
        if late_masks is not None and not late_masks.is_ready(constraints, num_generated):
            late.append(row)
            continue
        try:
            _fill(bits[len(filled)], num_generated, constraints)
        except ConstraintFailed as error:
            faults[row] = str(error)
            continue
        filled.append(positions[0])
        fork = constraints.fork() if drafts and not constraints.is_late else None
        for draft, position in zip(drafts, positions[1:], strict=True):
            if fork is None or fork.is_late or not _fill_next(bits[len(filled) - 1 :], draft, fork):
                break
            filled.append(position)
    order = np.argsort(filled)
    masks = TokenMasks(np.array(filled, np.int32)[order], bits[order]) if filled else None
    return StepMasks(masks, faults, frozenset(late))


def _fill_next(masks: NDArray[np.uint32], draft: int, fork: SequenceConstraints) -> bool:
    """Fill masks[1] for the token after a draft. False if masks[0] does not allow the draft, or none may follow."""
    if not masks[0, draft >> 5] >> np.uint32(draft & 31) & 1:
        return False
    fork.advance(draft)
    try:
        fork.fill_mask(masks[1])
    except ConstraintFailed:  # if the draft is sampled, a later step comes here without one
        return False
    return True


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
