"""TransformersPass: any decoder of transformers whose attention can be replaced, on the CPU or a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions, PassSpec, StepBatch
from penstock.backend.passes.cpu.in_torch.paged_cache import PagedCache
from penstock.backend.passes.cpu.in_torch.query_tiles import TileLimits
from penstock.backend.passes.cpu.path_choice import load_sampler
from penstock.backend.passes.cuda.device.cuda_device import open_gpu
from penstock.backend.passes.cuda.device.device import Device, annotate_faults
from penstock.backend.passes.ops.interface import CPU_KV_DTYPES, KV_BLOCK_BYTES, KV_BLOCK_VALUES
from penstock.backend.passes.transformers_model.attention import attention_by, paged_attention
from penstock.backend.passes.transformers_model.linear_attention import SlotStates, states_by
from penstock.backend.passes.transformers_model.model import (
    ModelFacts,
    foreign_code,
    load_model,
    read_facts,
    run_model,
)
from penstock.backend.sampling.sampler import HostSampling

_CPU = torch.device("cpu")
_TILE_LIMITS = TileLimits()


class TransformersPass(HostSampling):
    """Implements `IBatchedForwardPass` and `ICheckpointsStates`. The model's own code computes all but attention.

    It ignores PassOptions.deterministic: torch's products depend on the number of rows.
    """

    def __init__(
        self, facts: ModelFacts, model: Module, spec: PassSpec, max_running: int, gpu: Device | None = None
    ) -> None:
        """model is on the GPU, if there is one, else on the CPU."""
        super().__init__(facts.vocab_size, max_running, load_sampler(facts.vocab_size, max_running))
        self._gpu = gpu
        self._device = _CPU if gpu is None else gpu.torch_device
        self._facts = facts
        self._model: Module | None = model
        self._cache: PagedCache | None = None
        self._max_running = max_running
        self.create_checkpoints(0)
        self.spec = spec

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        with foreign_code(required := _require(model_dir)):
            return _spec(_read(required, options), options)

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> TransformersPass:
        return cls.load_on(_require(model_dir), options, None if options.device == "cpu" else open_gpu(options.device))

    @classmethod
    def load_on(cls, model_dir: Path, options: PassOptions, gpu: Device | None) -> TransformersPass:
        with foreign_code(model_dir):
            facts = _read(model_dir, options)
            spec = _spec(facts, options)
        model = load_model(model_dir, facts, _CPU if gpu is None else gpu.torch_device)
        return cls(facts, model, spec, options.max_running, gpu)

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._cache = PagedCache(
            self._facts.kv_shapes, num_pages, page_size_tokens, kv_dtype, _TILE_LIMITS, self._device
        )

    def create_checkpoints(self, num_checkpoints: int) -> None:
        """They are the states behind those of slots."""
        self._states = SlotStates({}, 0, self._device)  # frees the ones before: there is memory for one of both
        self._states = SlotStates(self._facts.state_shapes, self._max_running + num_checkpoints, self._device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        with self._faults(f"a step of {batch.num_tokens} tokens in {batch.num_rows} rows"):
            logits: NDArray[np.float32] = self._logits(batch).cpu().numpy()
        return logits

    def _logits(self, batch: StepBatch) -> Tensor:
        """On the device."""
        if self._cache is None or self._model is None:
            raise RuntimeError("forward is called before create_cache or after close")
        ids, logit_tokens = (
            torch.from_numpy(array.astype(np.int64)).to(self._device)
            for array in (self.begin_step(batch), batch.logit_tokens)
        )
        (step,), states = self._cache.begin_step(batch), self._states.begin_step(batch)
        for checkpoint, slot in batch.state_restores:
            self._states.copy(self._max_running + checkpoint, slot)
        with attention_by(paged_attention(step)), states_by(states):
            logits = run_model(self._model, ids, step.positions, logit_tokens)
        for slot, checkpoint in batch.state_saves:
            self._states.copy(slot, self._max_running + checkpoint)
        return logits

    def _faults(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext() if self._gpu is None else annotate_faults(self._gpu, doing)

    def close(self) -> None:
        self._cache = self._model = None
        self._states = SlotStates({}, 0, self._device)
        if self._gpu is not None:
            self._gpu.trim()


def _require(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise StartupError("the forward pass transformers needs a model: give --model a directory or a hub id")
    return model_dir


def _read(model_dir: Path, options: PassOptions) -> ModelFacts:
    return read_facts(model_dir, options.dtype, options.max_context_tokens)


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
        facts.weight_bytes,
        workspace_bytes=_workspace_bytes(facts, options),
        scores_prompts=True,
        has_llama_cpp_sampling=True,
        state_bytes_per_sequence=sum(shape.num_bytes for shape in facts.state_shapes.values()),
        copies_states=bool(facts.state_shapes),
    )


def _workspace_bytes(facts: ModelFacts, options: PassOptions) -> int:
    """An estimate: activations belong to the model's own code."""
    # A step's logits, twice: in the weights' dtype or fp32, and in fp32.
    logits = 2 * 4 * options.max_batch_tokens * facts.vocab_size
    if options.device == "cpu":
        return logits
    text = facts.config.get_text_config(decoder=True)
    # In fp32, for the tiles that one call handles: scores, capped ones and weights; keys and values from the cache.
    scores = max(_TILE_LIMITS.group_scores, _TILE_LIMITS.tile_tokens * facts.max_context_tokens)
    positions = max(_TILE_LIMITS.group_scores, facts.max_context_tokens)
    widest = max(shape.num_values for shape in facts.kv_shapes)
    attention: int = 4 * (3 * scores * text.num_attention_heads + 2 * positions * widest)
    # Per token, in fp32: the residual stream and what a layer makes of it.
    width: int = 4 * text.hidden_size + 3 * max(getattr(text, "intermediate_size", None) or 0, 4 * text.hidden_size)
    return logits + attention + 4 * width * options.max_batch_tokens
