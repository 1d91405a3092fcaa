"""Times products on several paths of the native kernels, for the choice between them at start."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, RopeConfig
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import StepBatch
from penstock.backend.lazy_torch import torch
from penstock.backend.passes.cpu.native_ops import NativeOps

TIMED_ROWS = (1, 32)
"""Rows of the products: one stream, which reads memory, and a full batch, which computes."""

_BUDGET_S = 0.15
_MIN_TURNS = 3
_HEAD_DIM = 64


def product_config(hidden_size: int, num_heads: int) -> DecoderConfig:
    """Return a layer whose product of q, k and v has hidden_size inputs, and 2 * num_heads heads of 64 outputs."""
    return DecoderConfig(
        architecture="timing",
        vocab_size=16,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=_HEAD_DIM,
        norm_eps=1e-5,
        max_context_tokens=max(TIMED_ROWS),
        rope=RopeConfig(_HEAD_DIM, tuple(1.0 for _ in range(_HEAD_DIM // 2))),
        tie_embeddings=False,
    )


_CONFIG = product_config(hidden_size=1024, num_heads=32)
"""8 MB of bf16."""


def time_products(libraries: Mapping[str, tuple[ctypes.CDLL, bool]]) -> dict[str, tuple[float, ...]]:
    """Return each path's least milliseconds for a bf16 product of 8 MB, in the order of TIMED_ROWS.

    libraries maps a path's name to its library and whether it uses tiles.
    """
    all_ops: list[NativeOps] = []
    try:
        with torch.inference_mode():
            products = {}
            for name, (library, uses_tiles) in libraries.items():
                # One thread: on a busy machine two threads may share a core for as long as this takes.
                ops = NativeOps(library, _CONFIG, Dtype.BF16, max(TIMED_ROWS), 1, spin_s=0.0, uses_tiles=uses_tiles)
                all_ops.append(ops)
                products[name] = timed_products(ops, _CONFIG)
            return _least_times(products)
    finally:
        for ops in all_ops:
            ops.close()


def timed_products(ops: NativeOps, config: DecoderConfig) -> list[Callable[[], float]]:
    """For each number of rows in TIMED_ROWS, a function that multiplies and returns its duration in seconds.

    ops is made for a `product_config`.
    """
    outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    weight = ops.pack_linear(torch.full((outputs, config.hidden_size), 0.01, dtype=torch.bfloat16), None)
    table = ops.table(torch.ones(config.vocab_size, config.hidden_size))
    norm = ops.vector(torch.ones(config.hidden_size))

    def multiply(batch: StepBatch) -> float:
        step = ops.begin_step(batch, batch.input_ids)
        x = ops.norm(ops.embed(table, step), norm)
        started_s = time.perf_counter()
        ops.linear(x, weight)
        return time.perf_counter() - started_s

    return [partial(multiply, _decode_step(num_rows)) for num_rows in TIMED_ROWS]


def _decode_step(num_rows: int) -> StepBatch:
    rows = np.arange(num_rows, dtype=np.int32)
    zeros = np.zeros(num_rows, np.int32)
    starts = np.arange(num_rows + 1, dtype=np.int32)
    return StepBatch(zeros, starts, zeros, zeros[:, None], rows, rows)


def _least_times(products: Mapping[str, list[Callable[[], float]]]) -> dict[str, tuple[float, ...]]:
    """Run all products in turns until the budget is used, so that other load affects all paths equally."""
    least = {name: [math.inf] * len(TIMED_ROWS) for name in products}
    deadline_s = time.perf_counter() + _BUDGET_S
    for turn in itertools.count():
        if turn >= _MIN_TURNS and time.perf_counter() > deadline_s:
            break
        for name, functions in products.items():
            least[name] = [min(seconds, run()) for seconds, run in zip(least[name], functions, strict=True)]
    return {name: tuple(1000 * seconds for seconds in times) for name, times in least.items()}
