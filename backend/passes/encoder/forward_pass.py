"""EncoderPass: encoders behind `IBatchedForwardPass`. Rows of a step are computed whole and pooled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import (
    IBatchedForwardPass,
    PassOptions,
    PassSpec,
    PooledRows,
    StepBatch,
    StepOutput,
    TokenMasks,
)
from penstock.backend.passes.cpu.library.thread_counts import SPIN_S, num_usable_cores
from penstock.backend.passes.cpu.path_choice import load_kernels, multiplies_bf16
from penstock.backend.passes.cuda.device.cuda_device import open_gpu
from penstock.backend.passes.encoder import cuda_loading as cuda_loading
from penstock.backend.passes.encoder.model import EncoderModel
from penstock.backend.passes.encoder.native_ops import NativeEncoderOps, unsupported_by_kernels
from penstock.backend.passes.encoder.ops import EncoderOps, EncoderRows, Fetched, Vectors
from penstock.backend.passes.encoder.spec import make_spec
from penstock.backend.passes.encoder.torch_ops import TorchEncoderOps
from penstock.backend.passes.shared_weights.memory_trimming import return_freed_memory

logger = logging.getLogger("penstock.backend")


def choose_dtype(config: EncoderConfig, options: PassOptions) -> torch.dtype:
    """The dtype to compute in; "auto" is bf16 where the kernels multiply it faster than fp32. Raises StartupError."""
    match options.dtype:
        case "bf16":
            return torch.bfloat16
        case "fp32":
            return torch.float32
        case "auto":
            is_fast = multiplies_bf16(options.cpu_path) and unsupported_by_kernels(config) is None
            return torch.bfloat16 if is_fast else torch.float32
    raise StartupError(f"dtype is {options.dtype!r}; it must be auto, bf16 or fp32")


def make_encoder_ops(config: EncoderConfig, dtype: torch.dtype, options: PassOptions) -> EncoderOps:
    """Return the fastest operations that this machine has for the model.

    Raises StartupError if the kernels of options.cpu_path, unless it is "auto", cannot be used.
    """
    unsupported = unsupported_by_kernels(config)
    if unsupported is not None:
        logger.info("The model runs on torch, slowly: the native kernels have no support for %s", unsupported)
        return TorchEncoderOps(config, dtype)
    kernels = load_kernels(options.cpu_path)
    if kernels is None:
        return TorchEncoderOps(config, dtype)
    return NativeEncoderOps(
        kernels.library, config, Dtype.of(dtype), num_usable_cores(), SPIN_S, uses_tiles=kernels.path.uses_tiles
    )


class EncoderPass(IBatchedForwardPass):
    """The handle between `forward` and `sample` is vectors that a GPU still computes."""

    def __init__(self, config: EncoderConfig, ops: EncoderOps, model: EncoderModel, spec: PassSpec) -> None:
        self._config = config
        self._ops = ops
        self._model = model
        self._spec = spec

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        # Imported here, as in `load`: given weights by its caller, the pass needs no package that reads checkpoints.
        from penstock.backend.checkpoint.encoders.read_config import read_encoder

        config = read_encoder(_require(model_dir), options.max_context_tokens)
        _check_options(options)
        if options.device != "cpu":
            return cuda_loading.plan_spec(config, options)
        return make_spec(config, choose_dtype(config, options), options.quantize)

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> EncoderPass:
        from penstock.backend.checkpoint.encoders.read_config import read_encoder
        from penstock.backend.checkpoint.encoders.weights import open_encoder

        model_dir = _require(model_dir)
        config = read_encoder(model_dir, options.max_context_tokens)
        _check_options(options)
        with return_freed_memory(), open_encoder(model_dir, config) as weights, torch.inference_mode():
            if options.device != "cpu":
                spec = cuda_loading.plan_spec(config, options)
                return cls(config, *cuda_loading.load(config, weights, options, open_gpu(options.device)), spec)
            dtype = choose_dtype(config, options)
            ops = make_encoder_ops(config, dtype, options)
            model = EncoderModel(config, ops, weights, dtype, int8=options.quantize == "int8")
        return cls(config, ops, model, make_spec(config, dtype, options.quantize))

    @property
    def spec(self) -> PassSpec:
        return self._spec

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """Never called: there is no cache."""

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> tuple[_Group, ...]:
        pooled = batch.pooled
        if pooled is None or len(pooled.rows) != batch.num_rows or batch.context_lens.any():
            raise ValueError("an encoder computes whole sequences, each for a pooled result")
        with self._ops.step(f"a step of {batch.num_rows} rows and {batch.num_tokens} tokens"):
            return tuple(self._pool(batch, pooled, first, end) for first, end in self._groups(batch.query_starts))

    def sample(
        self,
        logits: tuple[_Group, ...],
        batch: StepBatch,
        masks: TokenMasks | None = None,  # noqa: ARG002 - nothing is sampled
    ) -> _PendingVectors:
        return _PendingVectors(logits, batch.num_rows)

    def close(self) -> None:
        self._ops.close()

    def _groups(self, starts: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
        """Consecutive rows that are computed together: few enough that what they compute stays in caches."""
        first = 0
        for row in range(1, len(starts)):
            if row + 1 == len(starts) or starts[row + 1] - starts[first] > self._ops.group_tokens:
                yield first, row
                first = row

    def _pool(self, batch: StepBatch, pooled: PooledRows, first: int, end: int) -> _Group:
        """Compute rows [first, end)."""
        starts = batch.query_starts[first : end + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        starts = starts - starts[0]
        token_types = self._token_types(starts, pooled.second_starts[first:end])
        kinds = pooled.kinds[first:end]
        only_first = all(self._model.heads[kind].pooling == ("cls",) for kind in set(kinds))
        hidden = self._model.run(EncoderRows(batch.input_ids[tokens], starts, token_types, only_first))
        ends = list(pairwise(starts.tolist()))
        blocks: list[_Block] = []
        vectors: list[Vectors] = []
        for kind in dict.fromkeys(kinds):
            head = self._model.heads[kind]
            places = [place for place, other in enumerate(kinds) if other == kind]
            if head.pooling:
                blocks.append(_Block([first + place for place in places], is_of_rows=True))
                vectors.append(head.of_pooled(self._ops.pool(hidden, [ends[place] for place in places], head.pooling)))
            else:
                blocks += [_Block([first + place], head.is_of_row) for place in places]
                vectors += [head.of_tokens(hidden[slice(*ends[place])]) for place in places]
        return _Group(blocks, self._ops.fetch(vectors))

    def _token_types(self, starts: NDArray[np.int32], second_starts: NDArray[np.int32]) -> NDArray[np.int32]:
        types = np.zeros(int(starts[-1]), np.int32)
        if self._config.num_token_types > 1 and second_starts.any():
            for start, end, second in zip(starts[:-1], starts[1:], second_starts, strict=True):
                if second:
                    types[start + second : end] = 1
        return types


@dataclass(frozen=True, slots=True)
class _Block:
    """Vectors that were computed together."""

    rows: list[int]
    """Indices of the step's rows."""
    is_of_rows: bool
    """There is one for each row; otherwise one for each token of the only row."""


@dataclass(frozen=True, slots=True)
class _Group:
    blocks: list[_Block]
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class _PendingVectors:
    """Implements `PendingOutput`."""

    groups: tuple[_Group, ...]
    num_rows: int

    def wait(self) -> StepOutput:
        results: dict[int, NDArray[np.float32]] = {}
        for group in self.groups:
            for block, vectors in zip(group.blocks, group.fetched.wait(), strict=True):
                results |= zip(block.rows, vectors if block.is_of_rows else [vectors], strict=True)
        return StepOutput(np.empty(0, np.int32), pooled=tuple(results[row] for row in range(self.num_rows)))


def _check_options(options: PassOptions) -> None:
    if options.quantize not in ("none", "int8"):
        raise StartupError(f"--quantize is {options.quantize}; of an encoder it must be none or int8")


def _require(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise StartupError("the encoder pass needs a model: give --model a directory or a hub id")
    return model_dir
