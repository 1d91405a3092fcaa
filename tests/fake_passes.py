"""Fake passes with a state, with windows and with groups of layers, and the oracle of the tokens that fakes sample."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.forward_pass import NO_ADAPTER, PassOptions, PassSpec, StepBatch
from penstock.backend.passes.fake import ADAPTER_STEP, FakePass, position_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def next_token(
    token_ids: Sequence[int],
    vocab_size: int,
    kv_windows: tuple[int | None, ...] = (None,),
    adapter: int = NO_ADAPTER,
) -> int:
    """The token that the fake pass samples greedily after token_ids: the oracle for tests of the engine."""
    tokens = np.array(token_ids, np.int32)
    hashes, total = position_hashes(tokens, np.arange(len(tokens))), 0
    hashes += np.uint64(ADAPTER_STEP * (adapter - NO_ADAPTER))
    for group, window in enumerate(kv_windows):
        total += (2 * group + 1) * int(hashes[-(window or len(tokens)) :].sum(dtype=np.uint64))
    return (total % (1 << 64) >> 16) % vocab_size


class StatefulFakePass(FakePass):
    """The fake pass with a state: a row continues from the sum that its slot has kept, not from the pages.

    It samples the same tokens, if each token is added exactly once. A page with another token than the state has seen
    is a bug, which it reports.
    """

    def __init__(self, vocab_size: int, max_running: int, *others: Any) -> None:
        super().__init__(vocab_size, max_running, *others)
        self._states = np.zeros(max_running, np.uint64)
        self._checkpoints = np.zeros(0, np.uint64)
        self.spec = _with_state(self.spec)

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        return _with_state(super().describe(model_dir, options))

    def create_checkpoints(self, num_checkpoints: int) -> None:
        self._checkpoints = np.zeros(num_checkpoints, np.uint64)

    def _sums_before(self, batch: StepBatch) -> NDArray[np.uint64]:
        for init in batch.slot_inits:
            self._states[init.slot] = 0
        for checkpoint, slot in batch.state_restores:
            self._states[slot] = self._checkpoints[checkpoint]
        if (self._states[batch.slots] != super()._sums_before(batch)).any():
            raise ValueError("a slot's state is not that after the tokens in its pages")
        return self._states[batch.slots]

    def _keep(self, batch: StepBatch, sums: NDArray[np.uint64]) -> None:
        self._states[batch.slots] = sums[batch.query_starts[1:] - 1]
        for slot, checkpoint in batch.state_saves:
            self._checkpoints[checkpoint] = self._states[slot]


def _with_state(spec: PassSpec) -> PassSpec:
    num_bytes = np.dtype(np.uint64).itemsize
    return replace(spec, state_bytes_per_sequence=num_bytes, copies_states=True, verifies_drafts=False)


def _with_windows(spec: PassSpec, kv_windows: tuple[int | None, ...]) -> PassSpec:
    sizes = {name: size * len(kv_windows) for name, size in spec.kv_bytes_per_token.items()}
    return replace(spec, kv_windows=kv_windows, kv_bytes_per_token=sizes)


class WindowedFakePass(FakePass):
    """The fake pass with a window: a token's sum is over itself and the WINDOW_TOKENS - 1 tokens before it.

    The cache holds each token's own hash, so each page of the window is read.
    """

    WINDOW_TOKENS = 6
    KV_WINDOWS: tuple[int | None, ...] = (WINDOW_TOKENS,)

    def __init__(self, vocab_size: int, max_running: int, *others: Any) -> None:
        super().__init__(vocab_size, max_running, *others)
        self.spec = _with_windows(self.spec, self.KV_WINDOWS)

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        return _with_windows(super().describe(model_dir, options), cls.KV_WINDOWS)

    def _add_up(
        self, batch: StepBatch, rows: NDArray[np.int64], positions: NDArray[np.int64], hashes: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        return self._sum_of_window(batch.page_table, self.WINDOW_TOKENS, rows, positions, hashes)

    def _sum_of_window(
        self,
        page_table: NDArray[np.int32],
        window_tokens: int,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        hashes: NDArray[np.uint64],
    ) -> NDArray[np.uint64]:
        page_size = self._sums.shape[1]
        self._sums[page_table[rows, positions // page_size], positions % page_size] = hashes
        seen = positions[:, None] - np.arange(window_tokens)
        places = np.maximum(seen, 0)
        found = self._sums[page_table[rows[:, None], places // page_size], places % page_size]
        sums: NDArray[np.uint64] = np.where(seen >= 0, found, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        return sums


class GroupedFakePass(WindowedFakePass):
    """The fake pass with three groups of layers: a token's sum is over all tokens, and again over two windows.

    A page of any group holds the hashes of its tokens.
    """

    KV_WINDOWS = (None, WindowedFakePass.WINDOW_TOKENS, 3)

    def _add_up(
        self, batch: StepBatch, rows: NDArray[np.int64], positions: NDArray[np.int64], hashes: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        total = np.zeros(len(positions), np.uint64)
        longest = int(positions.max(initial=0)) + 1
        for group, window in enumerate(self.KV_WINDOWS):
            # Each group's pages hold something else, so that a page of another group gives a wrong sum.
            salted = hashes * np.uint64(2 * group + 1)
            total += self._sum_of_window(batch.page_table[:, :, group], window or longest, rows, positions, salted)
        return total
