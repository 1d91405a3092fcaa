"""Passes without weights that pool, for tests of the whole system: an encoder, which has every kind, and a decoder.

A vector is a hash of all the sequence's tokens, its kind and where the second text begins. So rows that are mixed up, a
sequence that is not computed whole, and a wrong kind give other vectors than `fake_vectors`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import PassOptions, PassSpec, StepBatch, StepOutput, TokenMasks
from penstock.backend.passes.fake import FakePass, FakeTower, fake_vocab_size, position_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_MAX_CONTEXT_TOKENS = 512
_WIDTHS = {"embed": 8, "token_embed": 4, "classify": 3, "token_classify": 2}
_KIND_STRIDE = 0x632BE59BD9B4E019
_SECOND_STRIDE = 0x2545F4914F6CDD1D
_MASK = (1 << 64) - 1
_SPARSE_PART = 8
_KINDS = ("embed", "token_embed", "sparse", "classify", "token_classify")


def fake_vectors(token_ids: Sequence[int], kind: str, second_start: int, vocab_size: int) -> NDArray[np.float32]:
    """[vectors, width]: what the fakes give for a sequence, in [-1, 1). The oracle for tests of the engine."""
    hashes = position_hashes(np.array(token_ids, np.int32), np.arange(len(token_ids)))
    total = hashes.sum(dtype=np.uint64)
    seeds = hashes + total if kind.startswith("token_") else total[None]
    return _values(seeds, kind, second_start, vocab_size if kind == "sparse" else _WIDTHS[kind])


def _values(seeds: NDArray[np.uint64], kind: str, second_start: int, width: int) -> NDArray[np.float32]:
    """[seeds, width]"""
    task = np.array(_KINDS.index(kind) * _KIND_STRIDE + second_start * _SECOND_STRIDE & _MASK, np.uint64)
    columns = position_hashes(np.zeros(width, np.int32), np.arange(width))
    mixed = (columns[None] ^ (seeds + task)[:, None]) * np.uint64(0x9E3779B97F4A7C15)
    values: NDArray[np.float32] = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    if kind == "sparse":
        values[(mixed >> np.uint64(8)) % np.uint64(_SPARSE_PART) != 0] = 0
    return values


class FakeEncoder:
    """A fake encoder. vocab_size is that of the checkpoint's config.json, or 4096 without a checkpoint."""

    def __init__(self, vocab_size: int) -> None:
        self.spec = _spec(vocab_size)

    @classmethod
    def describe(cls, model_dir: Path | None, _options: PassOptions) -> PassSpec:
        return _spec(fake_vocab_size(model_dir))

    @classmethod
    def load(cls, model_dir: Path | None, _options: PassOptions) -> FakeEncoder:
        return cls(fake_vocab_size(model_dir))

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        raise ValueError(f"{num_pages} pages of {page_size_tokens} tokens in {kv_dtype}; an encoder has no KV cache")

    def forward(self, batch: StepBatch) -> tuple[NDArray[np.float32], ...]:
        if batch.pooled is None:
            return ()
        pooled, vocab_size = batch.pooled, self.spec.vocab_size
        vectors = []
        for row, kind, second_start in zip(pooled.rows, pooled.kinds, pooled.second_starts.tolist(), strict=True):
            start, end = batch.query_starts[row : row + 2]
            found = fake_vectors(batch.input_ids[start:end].tolist(), kind, second_start, vocab_size)
            vectors.append(found if kind.startswith("token_") else found[0])
        return tuple(vectors)

    def sample(
        self,
        logits: tuple[NDArray[np.float32], ...],
        batch: StepBatch,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        return StepOutput(np.zeros(0, np.int32), pooled=logits)

    def close(self) -> None:
        """There is nothing to free."""


def _spec(vocab_size: int) -> PassSpec:
    return PassSpec(vocab_size, _MAX_CONTEXT_TOKENS, {}, pooled=_WIDTHS | {"sparse": vocab_size}, generates=False)


class PoolingFakePass(FakePass):
    """The fake pass as a decoder that also embeds and classifies: from the sum up to a sequence's last token."""

    def __init__(
        self,
        vocab_size: int,
        max_running: int,
        host_kv_bytes: int = 0,
        num_adapters: int = 0,
        tower: FakeTower | None = None,
    ) -> None:
        super().__init__(vocab_size, max_running, host_kv_bytes, num_adapters, tower)
        self.spec = _with_kinds(self.spec)
        self._last_sums = np.zeros(0, np.uint64)

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        return _with_kinds(super().describe(model_dir, options))

    def _keep(self, batch: StepBatch, sums: NDArray[np.uint64]) -> None:
        self._last_sums = sums[batch.query_starts[1:] - 1]

    def sample(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        output = super().sample(logits, batch, masks)
        if (pooled := batch.pooled) is None:
            return output
        rows = zip(pooled.rows, pooled.kinds, pooled.second_starts.tolist(), strict=True)
        vectors = [_values(self._last_sums[row : row + 1], kind, start, _WIDTHS[kind])[0] for row, kind, start in rows]
        return replace(output, pooled=tuple(vectors))


def _with_kinds(spec: PassSpec) -> PassSpec:
    return replace(spec, pooled={kind: _WIDTHS[kind] for kind in ("embed", "classify")})
