"""PooledDecoderPass: a decoder on the CPU that returns vectors or scores of sequences instead of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.config_json import choose_dtype, read_declared_dtype
from penstock.backend.checkpoint.encoders.decoder_heads import read_head
from penstock.backend.checkpoint.encoders.pooled_decoder import PooledDecoder
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.quantization.modes import check_sizes, find_cpu_quantization
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions, PassSpec, StepBatch, StepOutput, TokenMasks
from penstock.backend.passes.cpu.path_choice import check_cpu_path
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.spec import WeightsWithHead, make_spec, pooled_spec
from penstock.backend.passes.ops.cpu_interface import CpuOps
from penstock.backend.passes.ops.interface import CPU_KV_DTYPES, Weights


class PooledDecoderPass(CpuDecoderPass):
    """The handle between `forward` and `sample` is the pooled arrays. Pages and chunks are a decoder's."""

    def __init__(
        self,
        pooled: PooledDecoder,
        weights: Weights,
        ops: CpuOps,
        dtype: Dtype,
        max_running: int,
        spec: PassSpec,
    ) -> None:
        super().__init__(pooled.config, weights, ops, dtype, max_running)
        self._gives_hidden_states = pooled.head == "embed"
        self._spec = spec

    @classmethod
    def describe_pooled(cls, model_dir: Path, options: PassOptions, pooled: PooledDecoder) -> PassSpec:
        check_cpu_path(options.cpu_path)
        quantization = find_cpu_quantization(options.quantize)
        if quantization is not None:
            check_sizes(quantization, pooled.config)
        dtype = choose_dtype(options.dtype, read_declared_dtype(model_dir) or Dtype.BF16)
        spec = make_spec(pooled.config, dtype, CPU_KV_DTYPES, quantization, read_stored_formats(model_dir))
        return pooled_spec(spec, pooled)

    @classmethod
    def load_pooled(cls, model_dir: Path, options: PassOptions, pooled: PooledDecoder) -> PooledDecoderPass:
        spec = cls.describe_pooled(model_dir, options, pooled)
        head = read_head(model_dir, pooled)

        def build(weights: Weights, dtype: Dtype, ops: CpuOps) -> PooledDecoderPass:
            return cls(pooled, WeightsWithHead(weights, head), ops, dtype, options.max_running, spec)

        return cls._load(model_dir, options, pooled.config, build)

    def forward(self, batch: StepBatch) -> tuple[NDArray[np.float32], ...]:  # type: ignore[override]
        """Only the last tokens of the pooled rows go through the last layer."""
        rows = np.empty(0, np.int32) if batch.pooled is None else batch.pooled.rows
        inner = replace(batch, logit_rows=rows, pooled=None)
        scores = super().forward(inner)
        if not len(rows):
            return ()
        vectors = (
            self.host_hidden_states(np.empty((len(rows), 0), np.float32))
            if self._gives_hidden_states
            else scores.copy()
        )
        return tuple(vectors)

    def sample(
        self,
        logits: tuple[NDArray[np.float32], ...],  # type: ignore[override]
        batch: StepBatch,
        masks: TokenMasks | None = None,  # noqa: ARG002 - nothing is sampled
    ) -> StepOutput:
        return StepOutput(np.empty(0, np.int32), pooled=None if batch.pooled is None else logits)

    def host_logits(self, logits: tuple[NDArray[np.float32], ...]) -> NDArray[np.float32]:  # type: ignore[override] # noqa: ARG002
        return np.empty((0, self._config.vocab_size), np.float32)
