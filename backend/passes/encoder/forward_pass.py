"""EncoderPass: encoders behind `IBatchedForwardPass`. Rows of a step are computed whole and pooled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.checkpoint.encoders.read_config import read_encoder
from penstock.backend.checkpoint.encoders.weights import open_encoder
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions, PassSpec, StepBatch, StepOutput
from penstock.backend.passes.decoder.memory_trimming import return_freed_memory
from penstock.backend.passes.encoder.cpu_ops import choose_dtype, make_encoder_ops
from penstock.backend.passes.encoder.heads import pool_tokens
from penstock.backend.passes.encoder.model import EncoderModel
from penstock.backend.passes.encoder.ops import EncoderRows
from penstock.backend.passes.encoder.spec import make_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig
    from penstock.backend.forward_pass import PooledRows, TokenMasks
    from penstock.backend.passes.encoder.ops import EncoderOps


class EncoderPass(IBatchedForwardPass):
    """See `IBatchedForwardPass`. The handle between `forward` and `sample` is the pooled arrays."""

    def __init__(self, config: EncoderConfig, ops: EncoderOps, model: EncoderModel, spec: PassSpec) -> None:
        self._config = config
        self._ops = ops
        self._model = model
        self._spec = spec

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        config = read_encoder(_require(model_dir), options.max_context_tokens)
        _check_options(options)
        return make_spec(config, choose_dtype(config, options), options.quantize)

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> EncoderPass:
        model_dir = _require(model_dir)
        config = read_encoder(model_dir, options.max_context_tokens)
        _check_options(options)
        dtype = choose_dtype(config, options)
        ops = make_encoder_ops(config, dtype, options)
        with return_freed_memory(), open_encoder(model_dir, config) as weights, torch.inference_mode():
            model = EncoderModel(config, ops, weights, dtype, int8=options.quantize == "int8")
        return cls(config, ops, model, make_spec(config, dtype, options.quantize))

    @property
    def spec(self) -> PassSpec:
        return self._spec

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """Never called: there is no cache."""

    def forward(self, batch: StepBatch) -> tuple[NDArray[np.float32], ...]:
        pooled = batch.pooled
        if pooled is None or len(pooled.rows) != batch.num_rows or batch.context_lens.any():
            raise ValueError("an encoder computes whole sequences, each for a pooled result")
        self._ops.wake()
        results: list[NDArray[np.float32]] = []
        for first, end in self._groups(batch.query_starts):
            results += self._pool(batch, pooled, first, end)
        return tuple(results)

    def sample(
        self,
        logits: tuple[NDArray[np.float32], ...],
        batch: StepBatch,  # noqa: ARG002 - nothing is sampled
        masks: TokenMasks | None = None,  # noqa: ARG002 - as above
    ) -> StepOutput:
        return StepOutput(np.empty(0, np.int32), pooled=logits)

    def close(self) -> None:
        self._ops.close()

    def _groups(self, starts: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
        """Consecutive rows that are computed together: few enough that what they compute stays in caches."""
        first = 0
        for row in range(1, len(starts)):
            if row + 1 == len(starts) or starts[row + 1] - starts[first] > self._ops.group_tokens:
                yield first, row
                first = row

    def _pool(self, batch: StepBatch, pooled: PooledRows, first: int, end: int) -> list[NDArray[np.float32]]:
        """The results of rows [first, end)."""
        starts = batch.query_starts[first : end + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        starts = starts - starts[0]
        second_starts = pooled.second_starts[first:end]
        hidden = self._model.run(EncoderRows(batch.input_ids[tokens], starts, self._token_types(starts, second_starts)))
        rows = [hidden[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        results: dict[int, NDArray[np.float32]] = {}
        kinds = pooled.kinds[first:end]
        for kind in dict.fromkeys(kinds):
            head = self._model.heads[kind]
            places = [place for place, other in enumerate(kinds) if other == kind]
            if head.pooling:
                vectors = head.of_pooled(np.stack([pool_tokens(rows[place], head.pooling) for place in places]))
                results |= zip(places, vectors, strict=True)
            else:
                results |= {place: head.of_tokens(rows[place]) for place in places}
        return [results[place] for place in range(end - first)]

    def _token_types(self, starts: NDArray[np.int32], second_starts: NDArray[np.int32]) -> NDArray[np.int32]:
        types = np.zeros(int(starts[-1]), np.int32)
        if self._config.num_token_types > 1 and second_starts.any():
            for start, end, second in zip(starts[:-1], starts[1:], second_starts, strict=True):
                if second:
                    types[start + second : end] = 1
        return types


def _check_options(options: PassOptions) -> None:
    if options.device != "cpu":
        raise StartupError("encoders do not run on a GPU yet: use the CPU (--gpu none)")
    if options.quantize not in ("none", "int8"):
        raise StartupError(f"--quantize is {options.quantize}; of an encoder it must be none or int8")


def _require(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise StartupError("the encoder pass needs a model: give --model a directory or a hub id")
    return model_dir
