"""Checks at start that a forward pass, which may be third-party code, fits the tokenizer and its own spec."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import get_args

import numpy as np

from penstock.backend.checkpoint.files.tokenizer_file import count_token_ids
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassSpec, PooledRows, SamplingParams, SlotInit, StepBatch
from penstock.backend.forward_pass.extensions import read_host_logits
from penstock.shm.messages import PooledKind

_PER_TOKEN = frozenset(["token_embed", "token_classify"])
logger = logging.getLogger("penstock.backend")


def check_vocabulary(spec: PassSpec, model_dir: Path) -> None:
    """Raises StartupError if the tokenizer has token ids that the pass lacks.

    More logits than token ids are allowed: many models pad their vocabulary. Added tokens without logits, such as a
    padding token that fine-tuning left, only cause a warning: no prompt needs them.
    """
    counts = count_token_ids(model_dir)
    if counts is None or counts.with_added <= spec.vocab_size:
        return
    if counts.own > spec.vocab_size:
        raise StartupError(
            f"the forward pass has a vocab_size of {spec.vocab_size}; the tokenizer in {model_dir} has token ids up to "
            f"{counts.own - 1}: use the model's own tokenizer.json, or a vocab_size of at least {counts.own}"
        )
    logger.warning(
        "The tokenizer in %s has added tokens with ids up to %d, the model's logits end at %d: requests with such "
        "tokens are refused",
        model_dir,
        counts.with_added - 1,
        spec.vocab_size - 1,
    )


def check_groups(spec: PassSpec) -> None:
    """Raises StartupError for invalid windows, and for groups of layers with unequal parts."""
    windows = spec.kv_windows
    if not windows or any(window is not None and window < 1 for window in windows):
        raise StartupError(f"the forward pass has kv_windows {windows}: make them one or more, of 1 token or more")
    for kv_dtype, num_bytes in spec.kv_bytes_per_token.items():
        if num_bytes % len(windows):
            raise StartupError(
                f"the forward pass has {num_bytes} kv_bytes_per_token in {kv_dtype} for {len(windows)} groups of "
                "layers: make them a multiple, because each group has an equal part"
            )


def check_adapters(spec: PassSpec, num_adapters: int) -> None:
    """Raises StartupError if the pass does not have as many adapters as the operator gave."""
    if num_adapters and not spec.adapter_ranks:
        raise StartupError(
            "--lora-modules: this forward pass applies no adapters; the built-in decoder does, for models that "
            "generate. Or merge the adapter into its base model, and serve the result with --model"
        )
    if len(spec.adapter_ranks) != num_adapters:
        raise StartupError(
            f"the forward pass has {len(spec.adapter_ranks)} adapter_ranks for {num_adapters} adapters: give one each"
        )


def check_first_step(forward_pass: IBatchedForwardPass, spec: PassSpec) -> float | None:
    """Run a step of one token for each kind of result, and check what it returns. Raises StartupError.

    Returns the duration in seconds of a second step that samples a token: the first one also loads code and allocates.
    None for a model that does not generate. spec is the result of `describe`. The steps write to the first page of each
    group and use slot 0, before the engine gives out either.
    """
    if forward_pass.spec.vocab_size != spec.vocab_size:
        raise StartupError(
            f"the loaded forward pass has a vocab_size of {forward_pass.spec.vocab_size}; its describe() said "
            f"{spec.vocab_size}: make both the same"
        )
    _check_kinds(forward_pass.spec, spec)
    if forward_pass.spec.kv_windows != spec.kv_windows:
        raise StartupError(
            f"the loaded forward pass has kv_windows {forward_pass.spec.kv_windows}; its describe() said "
            f"{spec.kv_windows}: make both the same"
        )
    num_groups = len(spec.kv_windows) if spec.kv_bytes_per_token else 0
    token_step_s = None
    if spec.generates:
        batch = _one_token(None, num_groups)
        _check_sampling(forward_pass, spec, batch)
        began_s = time.perf_counter()
        forward_pass.sample(forward_pass.forward(batch), batch).wait()
        token_step_s = time.perf_counter() - began_s
    for kind, width in spec.pooled.items():
        row = np.zeros(1, np.int32)
        batch = _one_token(PooledRows(row, (kind,), row), num_groups)
        pooled = forward_pass.sample(forward_pass.forward(batch), batch).wait().pooled or ()
        shapes = [list(values.shape) for values in pooled]
        expected = [1, width] if kind in _PER_TOKEN else [width]
        if shapes != [expected]:
            raise StartupError(
                f'the forward pass returned vectors of shapes {shapes} for one row of one token of kind "{kind}" '
                f"instead of {[expected]}: make them as wide as spec.pooled"
            )
        _check_numbers(np.isnan(pooled[0]).any(), f'a vector of kind "{kind}"')
    return token_step_s


def _check_kinds(loaded: PassSpec, spec: PassSpec) -> None:
    if (loaded.pooled, loaded.generates) != (spec.pooled, spec.generates):
        raise StartupError(
            f"the loaded forward pass pools {dict(loaded.pooled)}; its describe() said {dict(spec.pooled)}, with "
            f"generates={spec.generates}: make both the same"
        )
    unknown = [kind for kind in spec.pooled if kind not in get_args(PooledKind)]
    if unknown or not (spec.pooled or spec.generates):
        raise StartupError(
            f"the forward pass pools {', '.join(spec.pooled) or 'nothing'} and does not generate; kinds are "
            f"{', '.join(get_args(PooledKind))}: change spec.pooled"
        )
    if spec.generates and not spec.kv_bytes_per_token:
        raise StartupError("the forward pass generates without a KV cache: fill spec.kv_bytes_per_token")
    if spec.kv_bytes_per_token and not _PER_TOKEN.isdisjoint(spec.pooled):
        raise StartupError("the forward pass has a KV cache, so inputs come in parts: it cannot give a vector a token")


def _one_token(pooled: PooledRows | None, num_groups: int) -> StepBatch:
    token = np.zeros(1, np.int32)
    pages = np.arange(num_groups, dtype=np.int32)
    return StepBatch(
        input_ids=token,
        query_starts=np.array([0, 1], np.int32),
        context_lens=np.zeros(1, np.int32),
        page_table=pages[None, None] if num_groups > 1 else pages[None],
        slots=np.zeros(1, np.int32),
        logit_rows=np.zeros(int(pooled is None), np.int32),
        slot_inits=(SlotInit(0, SamplingParams(temperature=0.0), token, 1),) if num_groups else (),
        pooled=pooled,
    )


def _check_sampling(forward_pass: IBatchedForwardPass, spec: PassSpec, batch: StepBatch) -> None:
    logits = forward_pass.forward(batch)
    # Without host_logits, the handle may be an object of the pass's own. Then its width is unknown.
    host = read_host_logits(forward_pass, logits)
    shape = getattr(host, "shape", None)
    if shape is not None and tuple(shape) != (1, spec.vocab_size):
        raise StartupError(
            f"the forward pass returned logits of shape {list(shape)} for one row instead of [1, {spec.vocab_size}]: "
            "make the logits as wide as spec.vocab_size"
        )
    _check_numbers(shape is not None and np.isnan(host).any(), "the row of logits")
    token_ids = forward_pass.sample(logits, batch).wait().token_ids
    if np.shape(token_ids) != (1,):
        raise StartupError(
            f"the forward pass sampled token ids of shape {list(np.shape(token_ids))} for one row; expected [1]"
        )


def _check_numbers(has_nan: bool | np.bool_, what: str) -> None:
    if has_nan:
        raise StartupError(
            f"after one token {what} of the forward pass has NaN: weights are not finite, or the model needs more than "
            "its dtype; get the files again, or try --dtype fp32"
        )
