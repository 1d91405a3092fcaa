"""DecoderPass: the Llama family behind `IBatchedForwardPass`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from backend.checkpoint.config_json import read_declared_dtype, read_decoder_config
from backend.checkpoint.weights import choose_dtype, expected_tensors, open_weights
from backend.errors import StartupError
from backend.forward_pass import PassOptions, PassSpec, StepBatch
from backend.passes.decoder.heap import freed_memory_returns
from backend.passes.decoder.model import DecoderModel
from backend.passes.decoder.native_library import load_library
from backend.passes.decoder.ops import (
    CPU_KV_DTYPES,
    KV_BLOCK_BYTES,
    KV_BLOCK_VALUES,
    HeadShape,
    Ops,
    quantisable,
)
from backend.passes.decoder.ops_deterministic import DeterministicTorchOps
from backend.passes.decoder.ops_native import NativeOps, native_serves
from backend.passes.decoder.ops_torch import TorchOps
from backend.passes.decoder.threads import usable_cores
from backend.sampler import HostSampling

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from backend.passes.decoder.config import DecoderConfig
    from backend.passes.decoder.model import Weights


SPIN_S = 50e-6
"""How long a kernel thread waits awake for the next operation: longer than the gaps within a step, shorter than those
between steps."""


class DecoderPass(HostSampling):
    """One decoder on one device. Logits travel to the host as numpy float32, where they are sampled."""

    def __init__(self, config: DecoderConfig, weights: Weights, ops: Ops, dtype: torch.dtype, max_running: int) -> None:
        super().__init__(config.vocab_size, max_running)
        self._config = config
        self._ops = ops
        with torch.inference_mode():
            self._model = DecoderModel(config, ops, weights, dtype)
        self._spec = make_spec(config, dtype)

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        model_dir = _needed(model_dir)
        config = read_decoder_config(model_dir, options.max_context_tokens)
        return make_spec(config, choose_dtype(options.dtype, read_declared_dtype(model_dir) or torch.bfloat16))

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> DecoderPass:
        model_dir = _needed(model_dir)
        if options.device != "cpu":
            raise StartupError(f"device {options.device!r}: the decoder pass runs on the cpu only")
        config = read_decoder_config(model_dir, options.max_context_tokens)
        with freed_memory_returns(), open_weights(model_dir, config) as weights:
            dtype = weights.choose_dtype(options.dtype)
            ops = make_cpu_ops(config, dtype, options.max_batch_tokens, deterministic=options.deterministic)
            return cls(config, weights, ops, dtype, options.max_running)

    @property
    def spec(self) -> PassSpec:
        return self._spec

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._ops.create_cache(self._config.num_layers, num_pages, page_size_tokens, kv_dtype)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        step = self._ops.begin_step(batch, self.begin_step(batch))
        logits = self._model.forward(step, wants_logits=len(batch.logit_rows) > 0)
        if logits is None:
            return np.empty((0, self._config.vocab_size), np.float32)
        return cast("NDArray[np.float32]", logits)

    def host_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        # The operations may reuse their buffer at the next step.
        return logits.copy()

    def close(self) -> None:
        self._ops.close()


def _needed(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise StartupError("the decoder pass needs a model: give --model a directory or a hub id")
    return model_dir


def make_spec(config: DecoderConfig, dtype: torch.dtype) -> PassSpec:
    """The spec of a model whose weights are of dtype; a KV cache wider than the weights is there for those who ask."""
    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    widths = {name: KV_BLOCK_BYTES[name] for name in CPU_KV_DTYPES if name != "q8_0" or quantisable(config.head_dim)}
    order = sorted(widths, key=lambda name: (widths[name] > KV_BLOCK_VALUES * dtype.itemsize, -widths[name]))
    num_weights = sum(math.prod(tensor.shape) for tensor in expected_tensors(config))
    return PassSpec(
        config.vocab_size,
        config.max_context_tokens,
        {name: values_per_token * widths[name] // KV_BLOCK_VALUES for name in order},
        num_weights * dtype.itemsize,
    )


def make_cpu_ops(
    config: DecoderConfig, dtype: torch.dtype, max_batch_tokens: int, *, deterministic: bool = False
) -> Ops:
    """The fastest operations that this machine offers for the model; the native ones are always deterministic."""
    library = load_library() if native_serves(config) else None
    if library is not None:
        return NativeOps(library, config, dtype, max_batch_tokens, usable_cores(), SPIN_S)
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    kind = DeterministicTorchOps if deterministic else TorchOps
    return kind(heads, config.rope, config.rms_norm_eps, dtype)
