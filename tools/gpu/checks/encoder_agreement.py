"""Compares a small encoder's vectors on the GPU with plain torch's on the CPU, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.forward_pass import PassOptions, PooledRows, StepBatch
from penstock.backend.passes.encoder import cuda_loading as loading
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from penstock.backend.passes.encoder.model import EncoderModel
from penstock.backend.passes.encoder.spec import make_spec
from penstock.backend.passes.encoder.torch_ops import TorchEncoderOps
from penstock.tools.gpu.cases.check import require, require_within
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.results import Results
from penstock.tools.random_weights import SMALL_BERT, RandomEncoderWeights

LENGTHS = (1, 16, 75, 150, 33, 250, 7)
_DISTANCE = {"fp32": 1e-5, "bf16": 1e-3}
"""Most that a vector's cosine may fall below 1."""


def check_encoder(results: Results, context: DeviceContext, lengths: Sequence[int] = LENGTHS) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(SMALL_BERT.vocab_size, size=length).astype(np.int32) for length in lengths]
    expected = _vectors(_on_cpu(), rows)
    for dtype, quantize in (("fp32", "none"), ("bf16", "none"), ("bf16", "int8")):
        name = f"encoder.{dtype}" if quantize == "none" else f"encoder.{quantize}"
        options = PassOptions(device="cuda:0", dtype=dtype, quantize=quantize, max_batch_tokens=sum(lengths))
        results.attempt(name, partial(_compare, results, context, name, options, rows, expected))


def _compare(
    results: Results,
    context: DeviceContext,
    name: str,
    options: PassOptions,
    rows: list[NDArray[np.int32]],
    expected: NDArray[np.float64],
) -> None:
    made = _on_gpu(context, options)
    found = _vectors(made, rows)
    alone = np.concatenate([_vectors(made, [row]) for row in rows])
    made.close()
    require("a vector has other bits beside other rows", np.array_equal(alone, found))
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    distance = float(np.max(1 - (found * expected).sum(axis=1) / norms))
    if options.quantize == "none":
        require_within("distance of a vector from the CPU's", distance, _DISTANCE[options.dtype])
    results.check(
        name, True, f"{len(rows)} vectors have the same bits alone; largest distance from the CPU's", distance
    )


def _vectors(forward_pass: EncoderPass, rows: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
    numbers, none = np.arange(len(rows), dtype=np.int32), np.zeros(len(rows), np.int32)
    batch = StepBatch(
        input_ids=np.concatenate(rows),
        query_starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        context_lens=none,
        page_table=np.zeros((len(rows), 0), np.int32),
        slots=numbers,
        logit_rows=np.empty(0, np.int32),
        pooled=PooledRows(numbers, ("embed",) * len(rows), none),
    )
    pooled = forward_pass.sample(forward_pass.forward(batch), batch).wait().pooled
    return np.stack(pooled or ()).astype(np.float64)


def _on_cpu() -> EncoderPass:
    """Plain torch: it needs no compilation and shares no code with our kernels."""
    ops = TorchEncoderOps(SMALL_BERT, torch.float32)
    with torch.inference_mode():
        model = EncoderModel(SMALL_BERT, ops, RandomEncoderWeights(SMALL_BERT), torch.float32, int8=False)
    return EncoderPass(SMALL_BERT, ops, model, make_spec(SMALL_BERT, torch.float32, "none"))


def _on_gpu(context: DeviceContext, options: PassOptions) -> EncoderPass:
    with torch.inference_mode():
        ops, model = loading.load(SMALL_BERT, RandomEncoderWeights(SMALL_BERT), options, context.device)
    return EncoderPass(SMALL_BERT, ops, model, loading.plan_spec(SMALL_BERT, options))
