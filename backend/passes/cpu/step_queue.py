"""Steps as the kernels receive them, and the queue from which these run one after the other without the interpreter
(kernels/step/step_queue.h)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ctypes import CDLL, Structure, addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import StepBatch, StepOutput
from penstock.backend.passes.cpu.library.native_structs import StepRows, declare_functions
from penstock.backend.passes.cpu.native_sampling import NativeSampler
from penstock.backend.passes.ops.rope_table import RopeTable
from penstock.backend.sampling.sampler import sampled_places

_P, _N = c_void_p, c_int64
_SIGNATURES = {
    "ps_open_queue": (_P, (_P,)),
    "ps_close_queue": (None, (_P,)),
    "ps_queue": (_N, (_P, _P)),
    "ps_await": (None, (_P, _N)),
    "ps_skip": (None, (_P, _N)),
}


class QueuedWork(Structure):
    _fields_ = (("rows", _P), ("operations", _P), ("count", _N), ("sampled", _P), ("last_tokens", _P))


def describe_rows(
    rows: StepRows, batch: StepBatch, input_ids: NDArray[np.int32], rope_table: RopeTable
) -> tuple[tuple[NDArray[np.int32], ...], NDArray[np.float32]]:
    """Fill in rows, except its arrays. Returns these, and the turns that rows points to."""
    verified = () if batch.drafts is None else (batch.verified_tokens,)
    scored = () if batch.scored is None else (batch.scored.tokens,)
    rows.num_verified, rows.num_scored = sum(map(len, verified)), sum(map(len, scored))
    tables = batch.page_table if batch.page_table.ndim == 2 else np.moveaxis(batch.page_table, 2, 0)
    rows.num_groups = 1 if batch.page_table.ndim == 2 else len(tables)
    adapters = () if batch.adapters is None else (batch.adapters,)
    rows.has_adapters = len(adapters)
    ends = () if batch.visible_ends is None else (batch.visible_ends,)
    rows.has_ends = len(ends)
    positions, longest = batch.rope_positions, max(batch.context_lens.tolist())
    rows.has_turns = positions is not None
    turns = rope_table.cover(longest + batch.num_tokens) if positions is None else rope_table.of_tokens(positions)
    rows.rope = turns.ctypes.data
    rows.num_tokens, rows.num_rows = batch.num_tokens, batch.num_rows
    rows.table_width, rows.num_logit_rows = batch.page_table.shape[1], len(batch.logit_rows)
    arrays = (
        *(input_ids, batch.query_starts, batch.context_lens, batch.slots, tables, batch.logit_rows),
        *(*verified, *scored, *adapters, *ends),
    )
    return arrays, turns


class ComputedStep(NamedTuple):
    rows: StepRows
    operations: int
    num_operations: int
    logits: NDArray[np.float32]
    """Computed when the queue is drained."""
    memory: tuple[object, ...]
    """What rows and operations point to."""


class StepQueue:
    """Used by the pass's thread; others wait for its results. Until `drain` nobody else may use the kernels."""

    def __init__(
        self,
        library: CDLL,
        engine: int | None,
        prepare: Callable[[StepBatch], ComputedStep | None],
        last_tokens: int,
        sampler: NativeSampler,
    ) -> None:
        """last_tokens: address of the tokens that the slots sampled last, int32, which the queue reads and writes."""
        self._library, self._last_tokens = library, last_tokens
        self._prepare, self._sampler = prepare, sampler
        declare_functions(library, _SIGNATURES)
        self._queue: int | None = library.ps_open_queue(engine)
        self._num_put = self._num_awaited = 0
        self._kept = deque[tuple[int, object]]()
        """What the kernels use until the work of this number is done, even if nobody waits for its tokens."""
        self._step: ComputedStep | None = None

    @property
    def is_computing(self) -> bool:
        """The last step was queued, and waits for `sample` or `drain`."""
        return self._step is not None

    def compute(self, batch: StepBatch) -> NDArray[np.float32] | None:
        """Queue the step and return its logits; None if it cannot be queued."""
        if self._step is not None:
            self.drain()
        moves = batch.slot_inits or batch.page_copies or batch.page_restores or batch.embeddings
        if moves or batch.scored is not None or batch.drafts is not None or not len(batch.logit_rows):
            return None  # it needs the host before the step or after it
        self._step = step = self._prepare(batch)
        if step is None:
            return None
        self._put(QueuedWork(addressof(step.rows), step.operations, step.num_operations, None, self._last_tokens))
        return step.logits

    def sample(self, batch: StepBatch) -> QueuedTokens | None:
        """Queue the sampling of the step in `compute`; None if that cannot be queued."""
        if self._step is None:
            return None
        sampled = self._sampler.prepare_queued(self._step.logits, *sampled_places(batch))
        if sampled is None:
            return None
        self._put(QueuedWork(None, None, 0, addressof(sampled.rows), self._last_tokens))
        self._kept.append((self._num_put, (self._step, sampled)))
        self._step = None
        return QueuedTokens(self, self._num_put, sampled.tokens)

    def _put(self, work: QueuedWork) -> None:
        self._num_put = self._library.ps_queue(self._queue, byref(work))
        while self._kept and self._kept[0][0] <= self._num_awaited:
            self._kept.popleft()

    def drain(self) -> None:
        """Wait until nothing is queued."""
        self.wait(self._num_put)
        self._step = None

    def wait(self, number: int) -> None:
        """Any thread may call it, and `skip`."""
        if self._queue is not None:
            self._library.ps_await(self._queue, number)
        self._num_awaited = number  # of two threads' numbers either will do

    def skip(self, number: int) -> None:
        self._library.ps_skip(self._queue, number)

    def close(self) -> None:
        """Idempotent."""
        if self._queue is not None:
            self._library.ps_close_queue(self._queue)
            self._queue = None


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """Implements `PendingOutput`."""

    queue: StepQueue
    number: int
    tokens: NDArray[np.int32]

    def wait(self) -> StepOutput:
        self.queue.wait(self.number)
        return StepOutput(self.tokens)

    def skip(self) -> None:
        self.queue.skip(self.number)
