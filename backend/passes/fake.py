"""A pass without weights, for tests of the whole system, and for measuring it without the cost of a model.

Its "model" is a hash. The KV cache holds, for each position, the sum of the hashes of all tokens up to it; the next
token is derived from that sum. So a token depends on every token before it, read through the page table: an engine that
mixes up pages, positions or slots gives other tokens. An embedding counts as the token that
`embedded_token` derives from its bytes. An adapter adds its own number to each token's hash. With a vision_config in
config.json it takes pictures: `FakeTower` makes one token of each _TOKEN_PIXELS bytes.
"""

from __future__ import annotations

import hashlib
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import NO_ADAPTER, EmbeddingRows, PassOptions, PassSpec, StepBatch
from penstock.backend.sampling.sampler import HostSampling

_DEFAULT_VOCAB_SIZE = 4096
_MAX_CONTEXT_TOKENS = 1 << 16
_PEAK_LOGIT = 8.0
ADAPTER_STEP = 0x1234567
EMBEDDING_SIZE = 4


_TOKEN_PIXELS = 64
_MAX_PICTURE_BYTES = 1 << 20


class _Config(msgspec.Struct):
    vocab_size: int
    vision_config: dict[str, Any] | None = None


class FakeTower:
    """Embeddings from the bytes of a picture. Each depends on all of them."""

    max_picture_bytes = _MAX_PICTURE_BYTES
    embedding_size = EMBEDDING_SIZE
    num_layers = 4

    def num_tokens(self, shape: tuple[int, ...], grid: tuple[int, int, int]) -> int:
        if grid[0] != 1:
            raise ValueError(f"its grid is {grid}; this model takes no videos")
        return -(-math.prod(shape) // _TOKEN_PIXELS)

    def encode(
        self, pixels: NDArray[np.uint8], grid: tuple[int, int, int], give_way: Callable[[], None]
    ) -> NDArray[np.float32]:
        for _ in range(self.num_layers):
            give_way()
        digest = hashlib.sha256(pixels.tobytes() + repr((pixels.shape, grid)).encode()).digest()
        values = np.frombuffer(digest, np.uint8)[: 4 * EMBEDDING_SIZE].astype(np.float32).reshape(EMBEDDING_SIZE, -1)
        places = np.arange(self.num_tokens(pixels.shape, grid), dtype=np.float32)
        return values @ np.array([1, 256, 65_536, 0], np.float32) + places[:, None]


def position_hashes(token_ids: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit hash for each (token, position): the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    x = (positions.astype(np.uint64) << np.uint64(32)) + token_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def embedded_token(row: NDArray[np.float32]) -> int:
    """The token that an embedding [EMBEDDING_SIZE] counts as."""
    return zlib.crc32(row.tobytes()) >> 1


def _spec(vocab_size: int, num_adapters: int = 0, max_picture_bytes: int = 0) -> PassSpec:
    return PassSpec(
        vocab_size,
        _MAX_CONTEXT_TOKENS,
        {"fp32": np.dtype(np.uint64).itemsize},
        scores_prompts=True,
        has_llama_cpp_sampling=True,
        embedding_size=EMBEDDING_SIZE,
        adapter_ranks=(1,) * num_adapters,
        max_picture_bytes=max_picture_bytes,
        verifies_drafts=True,
    )


def fake_vocab_size(model_dir: Path | None) -> int:
    """The checkpoint's vocabulary size, or a default. Raises StartupError."""
    return _read_config(model_dir).vocab_size


def _read_config(model_dir: Path | None) -> _Config:
    if model_dir is None:
        return _Config(_DEFAULT_VOCAB_SIZE)
    path = model_dir / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"{path}: {error}") from None


class FakePass(HostSampling):
    """A fake pass. vocab_size is that of the checkpoint's config.json, or 4096 without a checkpoint."""

    def __init__(
        self,
        vocab_size: int,
        max_running: int,
        host_kv_bytes: int = 0,
        num_adapters: int = 0,
        tower: FakeTower | None = None,
    ) -> None:
        super().__init__(vocab_size, max_running)
        self._host_kv_bytes = host_kv_bytes
        self.picture_tower = tower
        self.spec = _spec(vocab_size, num_adapters, 0 if tower is None else tower.max_picture_bytes)
        self._sums = self._saved_sums = np.zeros((0, 0), np.uint64)

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        config = _read_config(model_dir)
        takes_pictures = config.vision_config is not None
        return _spec(config.vocab_size, len(options.adapters), _MAX_PICTURE_BYTES if takes_pictures else 0)

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> FakePass:
        config = _read_config(model_dir)
        tower = None if config.vision_config is None else FakeTower()
        return cls(config.vocab_size, options.max_running, options.host_kv_bytes, len(options.adapters), tower)

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        if kv_dtype != "fp32":
            raise ValueError(f'kv_dtype is "{kv_dtype}"; the fake pass has fp32 only')
        self._sums = np.zeros((num_pages, page_size_tokens), np.uint64)
        num_host_pages = self._host_kv_bytes // (page_size_tokens * self._sums.itemsize)
        self._saved_sums = np.zeros((num_host_pages, page_size_tokens), np.uint64)

    @property
    def num_host_pages(self) -> int:
        return len(self._saved_sums)

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for page, host_page in pairs:
            self._saved_sums[host_page] = self._sums[page]

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        input_ids = self.begin_step(batch)
        if batch.embeddings:
            input_ids = input_ids.copy()
        for given in batch.embeddings:
            tokens = self._tokens_of(given.values)
            input_ids[given.first : given.first + len(tokens)] = tokens
        batch.check_page_moves()
        for host_page, page in batch.page_restores:
            self._sums[page] = self._saved_sums[host_page]
        for source, destination in batch.page_copies:
            self._sums[destination] = self._sums[source]
        lengths = np.diff(batch.query_starts)
        rows = np.repeat(np.arange(batch.num_rows), lengths)
        positions = np.arange(batch.num_tokens) - batch.query_starts[rows] + batch.context_lens[rows]
        hashes = position_hashes(input_ids, positions)
        if batch.adapters is not None:
            hashes += np.uint64(ADAPTER_STEP) * (batch.adapters[rows] - NO_ADAPTER).astype(np.uint64)
        totals = self._add_up(batch, rows, positions, hashes)[batch.logit_tokens]
        logits = np.zeros((len(totals), self.spec.vocab_size), np.float32)
        peaks = ((totals >> np.uint64(16)) % np.uint64(self.spec.vocab_size)).astype(np.int64)
        logits[np.arange(len(totals)), peaks] = _PEAK_LOGIT
        return logits

    def _add_up(
        self, batch: StepBatch, rows: NDArray[np.int64], positions: NDArray[np.int64], hashes: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """[T] the sum of the hashes up to each token, modulo 2**64. rows, positions and hashes: [T]."""
        page_size, before = self._sums.shape[1], self._sums_before(batch)
        running = np.cumsum(hashes, dtype=np.uint64)
        row_base = np.concatenate([np.zeros(1, np.uint64), running])[batch.query_starts[:-1]]
        sums: NDArray[np.uint64] = running - row_base[rows] + before[rows]
        self._sums[batch.page_table[rows, positions // page_size], positions % page_size] = sums
        self._keep(batch, sums)
        return sums

    def _sums_before(self, batch: StepBatch) -> NDArray[np.uint64]:
        """[R] the sum up to each row's context."""
        page_size, last = self._sums.shape[1], np.maximum(batch.context_lens - 1, 0)
        before = self._sums[batch.page_table[np.arange(batch.num_rows), last // page_size], last % page_size]
        return np.where(batch.context_lens > 0, before, np.uint64(0))

    def _keep(self, batch: StepBatch, sums: NDArray[np.uint64]) -> None:
        """Called with the sums up to each of the step's tokens, [T]."""

    def _tokens_of(self, values: EmbeddingRows) -> list[int]:
        return [embedded_token(row) for row in values.read()]

    def close(self) -> None:
        self._sums = self._saved_sums = np.zeros((0, 0), np.uint64)


class PacedFakePass(FakePass):
    """The fake pass with steps that take as long as a real model's: requests overlap, and can be interrupted."""

    STEP_S = 0.004

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        time.sleep(self.STEP_S)
        return super().forward(batch)
