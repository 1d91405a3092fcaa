"""Runs single operations of any CPU implementation: gives them arrays and reads their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, RopeConfig
from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.ops.interface import AttentionLayer

BF16, FP32 = torch.bfloat16, torch.float32

BASE = DecoderConfig(
    architecture="test",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=80,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    max_context_tokens=512,
    rope=RopeConfig(32, tuple(100.0 ** (-i / 16) for i in range(16))),
    tie_embeddings=False,
)
PLAIN = AttentionLayer(0, rope=None, window_tokens=None, q_norm=None, k_norm=None)


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_batch(contexts: list[int], lengths: list[int], page_size: int, *, seed: int = 0) -> StepBatch:
    """A step whose rows have as many pages as they need, in random order."""
    pages = [-(-(context + length) // page_size) for context, length in zip(contexts, lengths, strict=True)]
    deck = np.random.default_rng(seed).permutation(sum(pages)).tolist()
    table = np.zeros((len(pages), max(pages)), np.int32)
    for row, count in enumerate(pages):
        table[row, :count] = [deck.pop() for _ in range(count)]
    rows = np.arange(len(pages), dtype=np.int32)
    return StepBatch(
        input_ids=np.zeros(sum(lengths), np.int32),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        page_table=table,
        slots=rows,
        logit_rows=rows,
    )


class OpsHarness:
    """Gives arrays to one implementation and reads its results."""

    def __init__(self, ops: Any, num_pages: int = 1, page_size: int = 16, kv_dtype: str = "fp32") -> None:
        self.ops = ops
        ops.create_cache(1, num_pages, page_size, kv_dtype)

    def begin(self, num_tokens: int) -> Any:
        """Begin a step of one row, for operations that depend on the number of tokens only."""
        self.ops.create_cache(1, -(-num_tokens // 16), 16, "fp32")
        batch = step_batch([0], [num_tokens], 16)
        return self.ops.begin_step(batch, batch.input_ids)

    def put(self, name: str, x: Tensor) -> Any:
        """Return x as the implementation's own array. The native operations copy it to their buffer `name`."""
        if not isinstance(self.ops, NativeOps):
            return x.clone()
        self._rows(name)[: len(x)] = x
        return getattr(self.ops, name).address

    def _rows(self, name: str) -> Tensor:
        buffer = getattr(self.ops, name)
        return torch.from_numpy(buffer.rows).view(buffer.dtype.in_torch)

    def get(self, name: str, array: Any, num_rows: int) -> Tensor:
        if not isinstance(self.ops, NativeOps):
            return torch.as_tensor(array)
        return self._rows(name)[:num_rows].clone()


def check_rows_alone(
    harness: OpsHarness, sizes: tuple[int, int], dtype: torch.dtype, num_rows: int, spans: list[tuple[int, int]]
) -> None:
    """Check that rows of norms and linears have the same bits in a batch of num_rows and in each of the spans.

    sizes are the inputs of the linears, and the outputs of one of them before its gate.
    """
    hidden, gate_up = sizes
    ops, x, residual = harness.ops, randn(num_rows, hidden, dtype=dtype, seed=1), 3 * randn(num_rows, hidden, seed=2)
    linear, norm = ops.pack_linear(randn(256, hidden, dtype=dtype, seed=3), None), ops.vector(randn(hidden, seed=4))
    gated = ops.pack_linear(randn(gate_up, hidden, dtype=dtype, seed=5), None, is_gated=True)

    def run(first: int, last: int) -> list[Tensor]:
        rows = last - first
        harness.begin(rows)
        return [
            harness.get("_hidden", ops.norm(harness.put("_residual", residual[first:last]), norm), rows),
            harness.get("_qkv", ops.linear(harness.put("_hidden", x[first:last]), linear), rows),
            harness.get("_gated", ops.activated_linear(harness.put("_hidden", x[first:last]), gated), rows),
        ]

    together = run(0, num_rows)
    for first, last in spans:
        for found, expected in zip(run(first, last), together, strict=True):
            assert torch.equal(found, expected[first:last])


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float = 1e-5) -> None:
    """A bf16 result may be wrong by one or two roundings of its own size."""
    scale = float(expected.abs().max())
    tolerance = tolerance if dtype is FP32 else 1.2e-2
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance * scale, rtol=tolerance)
