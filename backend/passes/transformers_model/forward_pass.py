"""TransformersPass: any decoder of transformers whose attention can be replaced, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.passes.decoder.cpu.torch_cache.paged_cache import PagedCache
from penstock.backend.passes.decoder.ops import CPU_KV_DTYPES, KV_BLOCK_BYTES, KV_BLOCK_VALUES
from penstock.backend.passes.transformers_model.attention import attention_by, paged_attention
from penstock.backend.passes.transformers_model.linear_attention import SlotStates, states_by
from penstock.backend.passes.transformers_model.model import count_weight_bytes, load_model, read_facts, run_model
from penstock.backend.sampling.sampler import HostSampling

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch.nn import Module

    from penstock.backend.forward_pass import PassOptions, StepBatch
    from penstock.backend.passes.transformers_model.model import ModelFacts


class TransformersPass(HostSampling):
    """See `IBatchedForwardPass`. The model's own code computes all but attention, in torch.

    It ignores PassOptions.deterministic: torch's products depend on the number of rows.
    """

    def __init__(self, facts: ModelFacts, model: Module, spec: PassSpec, max_running: int) -> None:
        super().__init__(facts.vocab_size, max_running)
        self._facts = facts
        self._model: Module | None = model
        self._cache: PagedCache | None = None
        self._states = SlotStates(facts.state_shapes, max_running)
        self.spec = spec

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        return _spec(_read(model_dir, options), options)

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> TransformersPass:
        facts = _read(model_dir, options)
        return cls(facts, load_model(_require(model_dir), facts), _spec(facts, options), options.max_running)

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._cache = PagedCache(self._facts.kv_shapes, num_pages, page_size_tokens, kv_dtype)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        if self._cache is None or self._model is None:
            raise RuntimeError("forward is called before create_cache or after close")
        input_ids = torch.from_numpy(self.begin_step(batch).astype(np.int64))
        step, states = self._cache.begin_step(batch), self._states.begin_step(batch)
        logit_tokens = torch.from_numpy(batch.logit_tokens.astype(np.int64))
        with attention_by(paged_attention(step)), states_by(states):
            logits: NDArray[np.float32] = run_model(self._model, input_ids, step.positions, logit_tokens).numpy()
        return logits

    def close(self) -> None:
        self._cache = self._model = None
        self._states = SlotStates({}, 0)


def _require(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise StartupError("the forward pass transformers needs a model: give --model a directory or a hub id")
    return model_dir


def _read(model_dir: Path | None, options: PassOptions) -> ModelFacts:
    if options.device != "cpu":
        raise StartupError("the forward pass transformers runs on the CPU only: use --gpu none")
    return read_facts(_require(model_dir), options.dtype, options.max_context_tokens)


def _spec(facts: ModelFacts, options: PassOptions) -> PassSpec:
    num_values = sum(shape.num_values for shape in facts.kv_shapes)
    dims = {dim for shape in facts.kv_shapes for dim in (shape.key_dim, shape.value_dim)}
    names = [name for name in CPU_KV_DTYPES if name != "q8_0" or all(dim % KV_BLOCK_VALUES == 0 for dim in dims)]
    own_bytes = facts.dtype.itemsize * KV_BLOCK_VALUES
    order = sorted(names, key=lambda name: (KV_BLOCK_BYTES[name] > own_bytes, -KV_BLOCK_BYTES[name]))
    return PassSpec(
        facts.vocab_size,
        facts.max_context_tokens,
        {name: num_values * KV_BLOCK_BYTES[name] // KV_BLOCK_VALUES for name in order},
        count_weight_bytes(facts),
        # A step's logits, twice: in the weights' dtype or fp32, and in fp32.
        workspace_bytes=2 * 4 * options.max_batch_tokens * facts.vocab_size,
        scores_prompts=True,
        state_bytes_per_sequence=sum(shape.num_bytes for shape in facts.state_shapes.values()),
    )
