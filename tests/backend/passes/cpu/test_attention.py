"""Attention by each implementation against float64, over pages, heads and contexts of many sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, Scales
from tests.backend.passes.conftest import MakeOps
from tests.backend.passes.cpu.ops_harness import (
    BASE,
    BF16,
    FP32,
    PLAIN,
    OpsHarness,
    assert_close,
    randn,
    step_batch,
)
from tests.backend.passes.cpu.test_kv_cache import quantise_exactly

Shape = tuple[int, int, int]
"""Heads, KV heads and size of a head."""


def attend_exactly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    window: int | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    seen: range,
) -> Tensor:
    """Attention of q [n, heads, dim] at positions from `first` on, over k and v [m, kv_heads, dim], in float64.

    Those at the positions in seen attend to all of them.
    """
    num_queries, num_heads, dim = q.shape
    queries = q.double().view(num_queries, k.shape[1], -1, dim)
    scores = torch.einsum("pkgd,nkd->pkgn", queries, k.double()) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    distances = torch.arange(first, first + num_queries)[:, None] - torch.arange(len(k))
    own, other = torch.arange(first, first + num_queries)[:, None], torch.arange(len(k))
    both_ways = (own >= seen.start) & (own < seen.stop) & (other >= seen.start) & (other < seen.stop)
    is_hidden = ((distances < 0) & ~both_ways) | (distances >= (window or len(k)))
    scores = scores.masked_fill(is_hidden[:, None, None], -torch.inf)
    if sinks is not None:
        own = sinks.double().view(1, k.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=3)
    weights = torch.softmax(scores, dim=3)[..., : len(k)]
    return torch.einsum("pkgn,nkd->pkgd", weights, v.double()).reshape(num_queries, num_heads, dim)


def as_cached(x: Tensor, kv_dtype: str) -> Tensor:
    """x after storage in a cache of kv_dtype, in float64."""
    if kv_dtype != "q8_0":
        return x.to(FP32 if kv_dtype == "fp32" else BF16).double()
    numbers, scales = quantise_exactly(x)
    return numbers.double() * scales.double().repeat_interleave(32, dim=-1)


@cache
def random_qkv(num_tokens: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    num_heads, kv_heads, dim = shape
    return randn(num_tokens, (num_heads + 2 * kv_heads) * dim, dtype=dtype, seed=3)


@cache
def attended_exactly(
    shape: Shape,
    dtype: torch.dtype,
    kv_dtype: str,
    contexts: tuple[int, ...],
    lengths: tuple[int, ...],
    window: int | None,
    scale: float,
    cap: float | None,
    sinks: tuple[float, ...] | None,
    seen: range,
) -> Tensor:
    """What `check_attention` expects; kept, because all implementations are compared with it."""
    num_heads, kv_heads, dim = shape
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    rows = random_qkv(sum(totals), shape, dtype).view(-1, num_heads + 2 * kv_heads, dim).split(totals)
    exact = []
    for own, context in zip(rows, contexts, strict=True):
        k, v = (as_cached(x, kv_dtype) for x in own[:, num_heads:].chunk(2, dim=1))
        own_sinks = None if sinks is None else torch.tensor(sinks)
        exact.append(attend_exactly(own[context:, :num_heads], k, v, context, window, scale, cap, own_sinks, seen))
    return torch.cat(exact)


def check_attention(
    harness: OpsHarness,
    config: DecoderConfig,
    dtype: torch.dtype,
    kv_dtype: str,
    contexts: list[int],
    lengths: list[int],
    page_size: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    seen: range = range(0),
) -> None:
    """Write random contexts in one step; check attention of the next step's queries.

    In each row the tokens at the positions in seen attend to each other both ways.
    """
    ops, shape = harness.ops, (config.num_heads, config.num_kv_heads, config.head_dim)
    num_heads, _, dim = shape
    own_sinks = None if sinks is None else ops.vector(sinks)
    layer = replace(PLAIN, window_tokens=window, sinks=own_sinks, sees_ahead=bool(seen))
    cap = config.scales.scores_softcap
    whole = step_batch([0] * len(contexts), [c + n for c, n in zip(contexts, lengths, strict=True)], page_size)
    qkv = random_qkv(whole.num_tokens, shape, dtype)
    step = ops.begin_step(whole, whole.input_ids)
    ops.rotate_and_store(harness.put("_qkv", qkv), step, layer)

    ends = whole.query_starts[1:]
    tokens = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)])
    batch = replace(
        whole,
        input_ids=np.zeros(len(tokens), np.int32),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
    )
    if seen:
        own = np.concatenate([np.arange(c, c + n) for c, n in zip(contexts, lengths, strict=True)])
        seen_ends = np.where((own >= seen.start) & (own < seen.stop), seen.stop, own + 1)
        batch = replace(batch, visible_ends=seen_ends.astype(np.int32))
    step = ops.begin_step(batch, batch.input_ids)
    found = harness.get("_attended", ops.attention(harness.put("_qkv", qkv[tokens]), step, layer), len(tokens))

    sink_values = None if sinks is None else tuple(sinks.tolist())
    exact = attended_exactly(
        shape, dtype, kv_dtype, tuple(contexts), tuple(lengths), window, config.score_scale, cap, sink_values, seen
    )
    # The kernels multiply a q8_0 cache by queries and weights of 16 bits.
    tolerance = 1e-4 if kv_dtype == "q8_0" else 1e-5
    rounded = BF16 if dtype is BF16 or kv_dtype == "bf16" else FP32
    assert_close(found.view(-1, num_heads, dim), exact, rounded, tolerance)


PAGE_SIZES = (1, 5, 16, 32, 48, 64, 80)
DTYPES = [(dtype, kv_dtype) for dtype in (FP32, BF16) for kv_dtype in ("fp32", "bf16", "q8_0")]
WINDOWS = [((None, 90)[i % 2], *each) for i, each in enumerate(DTYPES)]


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_attention_matches_float64_for_any_page_size(dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps) -> None:
    for page_size in PAGE_SIZES:
        check_page_size(page_size, dtype, kv_dtype, make_ops)


def check_page_size(page_size: int, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps) -> None:
    """Decode and prefill rows in one step, with lengths near a page and near a block of 64."""
    near = [max(n + page_size * k - 1, 0) for k in (0, 1, 2) for n in (0, 1, 2)]
    contexts = [*near, 0, 62, 63, 64, 65, 130, 3]
    lengths = [*([1] * len(near)), 1, 1, 1, 2, 30, 7, 70]
    for window in (None, 9):
        harness = OpsHarness(make_ops(BASE, dtype), 700, page_size, kv_dtype)
        check_attention(harness, BASE, dtype, kv_dtype, contexts, lengths, page_size, window)


@pytest.mark.parametrize(("cap", "dtype", "kv_dtype"), [((None, 4.0)[i % 2], *each) for i, each in enumerate(DTYPES)])
def test_attention_with_other_scales_and_soft_caps_matches_float64(
    cap: float | None, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps
) -> None:
    """Scores of a standard deviation of 3, so that a cap of 4 changes most of them."""
    config = replace(BASE, scales=Scales(scores=0.5, scores_softcap=cap))
    harness = OpsHarness(make_ops(config, dtype), 64, 16, kv_dtype)
    check_attention(harness, config, dtype, kv_dtype, [0, 5, 100, 70, 12, 600], [1, 1, 1, 20, 33, 1], 16, 90)


@pytest.mark.parametrize(("window", "dtype", "kv_dtype"), WINDOWS)
def test_attention_with_sinks_matches_float64(
    window: int | None, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps
) -> None:
    """Sinks that nearly vanish, and that take nearly all of the weight, also in rows that the threads divide."""
    sinks = torch.tensor([-300.0, 0.5, 7.0, 12.0])
    contexts, lengths = [0, 5, 100, 70, 12, 1500], [1, 1, 1, 20, 33, 1]
    harness = OpsHarness(make_ops(BASE, dtype), 130, 16, kv_dtype)
    check_attention(harness, BASE, dtype, kv_dtype, contexts, lengths, 16, window, sinks)


@pytest.mark.parametrize(("window", "dtype", "kv_dtype"), WINDOWS)
def test_tokens_of_a_picture_attend_to_each_other_both_ways(
    window: int | None, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps
) -> None:
    """Rows before, within and behind a picture of more than a piece of 512 positions."""
    harness = OpsHarness(make_ops(BASE, dtype), 130, 16, kv_dtype)
    check_attention(harness, BASE, dtype, kv_dtype, [0, 300, 650], [640, 310, 1], 16, window, seen=range(20, 605))


HEADS = [
    (head_dim, dtype, kv_dtype)
    for i, head_dim in enumerate((16, 32, 64, 80, 96, 128, 256))
    for dtype, kv_dtype in DTYPES[i % 2 :: 2]
    if kv_dtype != "q8_0" or head_dim % 32 == 0  # its blocks have 32 numbers
]
"""Each head size with each dtype of the cache."""


GROUPS = {32: (1, 3, 4, 8, 32), 64: (1, 3, 4, 8, 32), 128: (1, 3, 4, 8, 32)}
"""Query heads of a KV head, by head size; others have OTHER_GROUPS."""
OTHER_GROUPS = (3, 8)


@pytest.mark.parametrize(("head_dim", "dtype", "kv_dtype"), HEADS)
def test_attention_matches_float64_for_any_head_shape(
    head_dim: int, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps
) -> None:
    for group in GROUPS.get(head_dim, OTHER_GROUPS):
        config = replace(BASE, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
        harness = OpsHarness(make_ops(config, dtype), 64, 16, kv_dtype)
        check_attention(harness, config, dtype, kv_dtype, [0, 5, 100, 70, 12], [1, 1, 1, 20, 33], 16)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window"),
    [
        (FP32, "fp32", None), (FP32, "fp32", 300), (FP32, "q8_0", 700), (BF16, "bf16", 700), (BF16, "q8_0", None),
        (BF16, "q8_0", 300),
    ],
)  # fmt: skip
def test_attention_matches_float64_over_long_contexts(
    dtype: torch.dtype, kv_dtype: str, window: int | None, make_ops: MakeOps
) -> None:
    """Contexts so long that the kernels divide a row into pieces, also among several threads."""
    for contexts, lengths in (([1500], [1]), ([2047, 3, 512], [1, 1, 1]), ([511, 1000, 0], [1, 40, 600])):
        harness = OpsHarness(make_ops(BASE, dtype), 160, 32, kv_dtype)
        check_attention(harness, BASE, dtype, kv_dtype, contexts, lengths, 32, window)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0"])
def test_page_size_changes_no_bit(kv_dtype: str, make_kernels: MakeOps) -> None:
    """In prefill, and in decode of each position. A head's numbers have two scales in a q8_0 cache."""
    config = replace(BASE, head_dim=64)
    qkv, num_tokens = randn(150, 8 * 64), 150
    found = []
    for page_size in (32, 1, 5, 16, 48, 64, 80):
        harness = OpsHarness(make_kernels(config, FP32), 150, page_size, kv_dtype)
        whole = step_batch([0], [num_tokens], page_size)
        step = harness.ops.begin_step(whole, whole.input_ids)
        array = harness.put("_qkv", qkv)
        harness.ops.rotate_and_store(array, step, PLAIN)
        found.append(harness.get("_attended", harness.ops.attention(array, step, PLAIN), num_tokens))
        each = replace(
            whole,
            query_starts=np.arange(num_tokens + 1, dtype=np.int32),
            context_lens=np.arange(num_tokens, dtype=np.int32),
            slots=np.arange(num_tokens, dtype=np.int32),
            page_table=whole.page_table.repeat(num_tokens, axis=0),
            logit_rows=np.arange(num_tokens, dtype=np.int32),
        )
        step = harness.ops.begin_step(each, each.input_ids)
        array = harness.put("_qkv", qkv)
        found.append(harness.get("_attended", harness.ops.attention(array, step, PLAIN), num_tokens))
        harness.ops.close()
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0"])
def test_long_row_is_the_same_bits_however_threads_divide_it(
    kv_dtype: str, window: int | None, make_kernels: MakeOps
) -> None:
    """With one thread or many, alone or beside a row so long that this one is not divided, in prefill and decode."""
    layer = replace(PLAIN, window_tokens=window)
    ends = np.array([1300, 1300 + 6000])
    qkv = randn(ends[-1], 8 * 32, dtype=BF16)
    found = []
    for num_threads in (1, 2, 7):
        harness = OpsHarness(make_kernels(BASE, BF16, num_threads), 300, 32, kv_dtype)
        whole = step_batch([0, 0], [1300, 6000], 32)
        step = harness.ops.begin_step(whole, whole.input_ids)
        harness.ops.rotate_and_store(harness.put("_qkv", qkv), step, layer)
        for lengths in ([40], [1], [1, 1]):  # of all tokens, emulated tiles would take a minute
            rows = np.arange(len(lengths))
            starts = np.cumsum([0, *lengths]).astype(np.int32)
            batch = replace(
                whole,
                input_ids=np.zeros(starts[-1], np.int32),
                query_starts=starts,
                context_lens=np.array([1300, 6000], np.int32)[rows] - np.array(lengths, np.int32),
                slots=rows.astype(np.int32),
                page_table=whole.page_table[rows],
                logit_rows=rows.astype(np.int32),
            )
            step = harness.ops.begin_step(batch, batch.input_ids)
            tokens = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lengths, strict=False)])
            attended = harness.ops.attention(harness.put("_qkv", qkv[tokens]), step, layer)
            found.append(harness.get("_attended", attended, lengths[0])[-1])
        harness.ops.close()
    for other in found[1:]:
        assert torch.equal(other, found[0])
