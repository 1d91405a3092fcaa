"""Each operation of both implementations against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.backend.checkpoint.decoder_config import DecoderConfig, RopeConfig
from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.decoder.cpu.native_ops import NativeOps
from penstock.backend.passes.decoder.cpu.torch_kv_cache import Q8KvPages
from penstock.backend.passes.decoder.cpu.torch_linear import PackedLinear
from penstock.backend.passes.decoder.ops import AttentionLayer
from tests.backend.passes.decoder.conftest import MakeOps, make_native_ops

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
    rms_norm_eps=1e-5,
    max_context_tokens=512,
    rope=RopeConfig(32, tuple(100.0 ** (-i / 16) for i in range(16))),
    tie_embeddings=False,
)
PLAIN = AttentionLayer(0, uses_rope=False, window_tokens=None, q_norm=None, k_norm=None)


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_batch(contexts: list[int], lengths: list[int], page_size: int, *, seed: int = 0) -> StepBatch:
    """Rows with as many pages as they need, dealt at random."""
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


class Bench:
    """One implementation, with ways to hand it arrays and to look at its results."""

    def __init__(self, ops: Any, num_pages: int = 1, page_size: int = 16, kv_dtype: str = "fp32") -> None:
        self.ops = ops
        ops.create_cache(1, num_pages, page_size, kv_dtype)

    def begin(self, num_tokens: int) -> Any:
        """A step of one row, for operations that only count tokens."""
        self.ops.create_cache(1, -(-num_tokens // 16), 16, "fp32")
        batch = step_batch([0], [num_tokens], 16)
        return self.ops.begin_step(batch, batch.input_ids)

    def put(self, name: str, x: Tensor) -> Any:
        """x as an array of the implementation's; natively in its buffer of that name."""
        if not isinstance(self.ops, NativeOps):
            return x.clone()
        buffer = getattr(self.ops, name)
        buffer.rows[: len(x)] = x
        return buffer.address

    def get(self, name: str, array: Any, num_rows: int) -> Tensor:
        if not isinstance(self.ops, NativeOps):
            return torch.as_tensor(array)
        return torch.as_tensor(getattr(self.ops, name).rows[:num_rows]).clone()


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float = 1e-5) -> None:
    """bf16 results may be off by a rounding or two of their own size."""
    scale = float(expected.abs().max())
    tolerance = tolerance if dtype is FP32 else 1.2e-2
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 49, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_linears(num_rows: int, biased: bool, dtype: torch.dtype, make_ops: MakeOps) -> None:
    """Widths that fill no whole panel of the packed layout."""
    bench = Bench(make_ops(BASE, dtype))
    bench.begin(num_rows)
    ops, hidden, intermediate = bench.ops, BASE.hidden_size, BASE.intermediate_size
    x = randn(num_rows, hidden, dtype=dtype, seed=1)
    for name, call, outputs in (("_qkv", ops.linear, 256), ("_logits", ops.logits, BASE.vocab_size)):
        weight, bias = randn(outputs, hidden, dtype=dtype, seed=2), randn(outputs, dtype=dtype, seed=3)
        exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
        found = call(bench.put("_hidden", x), ops.pack_linear(weight, bias if biased else None))
        close(bench.get(name, found, num_rows), exact, dtype)
    weight, bias = randn(2 * intermediate, hidden, dtype=dtype, seed=4), randn(2 * intermediate, dtype=dtype, seed=5)
    gate, up = (x.double() @ weight.double().T + (bias.double() if biased else 0)).chunk(2, dim=1)
    gated = ops.gated_linear(bench.put("_hidden", x), ops.pack_gated(weight, bias if biased else None))
    close(bench.get("_gated", gated, num_rows), torch.nn.functional.silu(gate) * up, dtype)
    residual, y = randn(num_rows, hidden, seed=6), randn(num_rows, intermediate, dtype=dtype, seed=7)
    weight, bias = randn(hidden, intermediate, dtype=dtype, seed=8), randn(hidden, dtype=dtype, seed=9)
    exact = residual.double() + y.double() @ weight.double().T + (bias.double() if biased else 0)
    array = bench.put("_residual", residual)
    ops.linear_add(bench.put("_gated", y), ops.pack_linear(weight, bias if biased else None), array)
    close(bench.get("_residual", array, num_rows), exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_rows", [1, 7, 96, 97, 200])
def test_long_products(num_rows: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    """More inputs than the native kernel takes at once, and more rows."""
    config = replace(BASE, intermediate_size=4500)
    bench = Bench(make_ops(config, dtype))
    bench.begin(num_rows)
    residual, x = randn(num_rows, 48, seed=1), randn(num_rows, 4500, dtype=dtype, seed=2)
    weight = randn(48, 4500, dtype=dtype, seed=3)
    array = bench.put("_residual", residual)
    bench.ops.linear_add(bench.put("_gated", x), bench.ops.pack_linear(weight, None), array)
    close(bench.get("_residual", array, num_rows), residual.double() + x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_silu_has_no_overflow_at_either_end(dtype: torch.dtype, make_ops: MakeOps) -> None:
    config = replace(BASE, hidden_size=2, intermediate_size=16)
    bench = Bench(make_ops(config, dtype))
    bench.begin(1)
    gates = torch.tensor(
        [-3e38, -1e4, -200.0, -88.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 88.0, 200.0, 1e4, 1e30, 3e38]
    )
    weight = torch.stack([torch.cat([gates, torch.zeros(16)]), torch.cat([torch.zeros(16), torch.ones(16)])], dim=1)
    found = bench.ops.gated_linear(
        bench.put("_hidden", torch.ones(1, 2, dtype=dtype)), bench.ops.pack_gated(weight.to(dtype), None)
    )
    exact = torch.nn.functional.silu(gates.to(dtype).double())
    torch.testing.assert_close(
        bench.get("_gated", found, 1)[0].double(), exact, rtol=1e-5 if dtype is FP32 else 8e-3, atol=1e-30
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("hidden", [2, 16, 48, 72, 1000])
def test_rms_norm(hidden: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    bench = Bench(make_ops(replace(BASE, hidden_size=hidden), dtype))
    bench.begin(9)
    x, weight = randn(9, hidden, seed=1), randn(hidden, seed=2)
    found = bench.ops.rms_norm(bench.put("_residual", x), bench.ops.vector(weight))
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + BASE.rms_norm_eps) * weight.double()
    close(bench.get("_hidden", found, 9), exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tied", [False, True])
def test_embed(tied: bool, dtype: torch.dtype, make_ops: MakeOps) -> None:
    bench = Bench(make_ops(BASE, dtype), num_pages=3)
    weight = randn(BASE.vocab_size, BASE.hidden_size, dtype=dtype)
    ids = np.array([99, 0, 63, 64, 65, *range(30)], np.int32)
    batch = replace(step_batch([0], [len(ids)], 16), input_ids=ids)
    ops = bench.ops
    table = ops.tied_table(weight, ops.pack_linear(weight, None)) if tied else ops.table(weight)
    found = ops.embed(table, ops.begin_step(batch, ids))
    torch.testing.assert_close(bench.get("_residual", found, len(ids)), weight[ids].float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_are_the_same_bits_in_any_number(dtype: torch.dtype, make_deterministic: MakeOps) -> None:
    """Sizes at which libraries choose other kernels, and cut arrays for their threads."""
    config = replace(BASE, hidden_size=520, intermediate_size=1111 * 2)
    bench = Bench(make_deterministic(config, dtype))
    ops, x, residual = bench.ops, randn(301, 520, dtype=dtype, seed=1), 3 * randn(301, 520, seed=2)
    linear, norm = ops.pack_linear(randn(256, 520, dtype=dtype, seed=3), None), ops.vector(randn(520, seed=4))
    gated = ops.pack_gated(randn(4444, 520, dtype=dtype, seed=5), None)

    def run(first: int, last: int) -> list[Tensor]:
        rows = last - first
        bench.begin(rows)
        return [
            bench.get("_hidden", ops.rms_norm(bench.put("_residual", residual[first:last]), norm), rows),
            bench.get("_qkv", ops.linear(bench.put("_hidden", x[first:last]), linear), rows),
            bench.get("_gated", ops.gated_linear(bench.put("_hidden", x[first:last]), gated), rows),
        ]

    together = run(0, 301)
    for first, last in ((0, 1), (77, 78), (300, 301), (5, 22), (64, 160)):
        for found, expected in zip(run(first, last), together, strict=True):
            assert torch.equal(found, expected[first:last])


def test_bf16_products_where_the_cpu_has_no_packed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    x, weight, bias = randn(7, 48, dtype=BF16), randn(100, 48, dtype=BF16, seed=1), randn(100, dtype=BF16, seed=2)
    linear = PackedLinear.pack(weight, bias)
    assert linear.weight is weight
    close(linear(x), x.double() @ weight.double().T + bias.double(), BF16)


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """q [heads, dim] at position over k and v [n, kv_heads, dim], in float64."""
    begin = 0 if window is None else max(0, position - window + 1)
    group = len(q) // k.shape[1]
    keys, values = (x[begin : position + 1].double().repeat_interleave(group, dim=1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), keys) * q.shape[1] ** -0.5, dim=1)
    return torch.einsum("hn,nhd->hd", weights, values)


def quantise_exactly(x: Tensor) -> tuple[Tensor, Tensor]:
    """GGML's q8_0 of x [..., dim]: int8 [..., dim] and binary16 [..., dim / 32], each operation in fp32 as there."""
    blocks = x.float().numpy().reshape(*x.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = (blocks * inverse).astype(np.float64)
    numbers = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8)
    return torch.from_numpy(numbers.reshape(x.shape)), torch.from_numpy(scale[..., 0].astype(np.float16))


def as_cached(x: Tensor, kv_dtype: str) -> Tensor:
    """What a cache of kv_dtype makes of x, in float64."""
    if kv_dtype != "q8_0":
        return x.to(FP32 if kv_dtype == "fp32" else BF16).double()
    numbers, scales = quantise_exactly(x)
    return numbers.double() * scales.double().repeat_interleave(32, dim=-1)


def stored_blocks(ops: Any, page_size: int) -> list[tuple[Tensor, Tensor]]:
    """Of keys and of values, int8 [pages, page_size, kv_heads, dim] and scales, as many for 32 dimensions each."""
    if not isinstance(ops, NativeOps):
        heads: list[Q8KvPages] = [ops.keys[0], ops.values[0]]
        return [
            (side.numbers.flatten(3).permute(1, 2, 0, 3), side.scales.squeeze(4).permute(1, 2, 0, 3)) for side in heads
        ]
    dim, num_scales, lanes = BASE.head_dim, BASE.head_dim // 32, 2
    raw = ops.cache[0].view(len(ops.cache[0]), BASE.num_kv_heads, -1)
    size = page_size * dim
    keys, values = raw[..., : 2 * size].view(torch.int8).chunk(2, dim=-1)
    if page_size % 16 == 0:
        keys = keys.reshape(*raw.shape[:2], dim // lanes, page_size, lanes).transpose(2, 3)
        values = values.reshape(*raw.shape[:2], page_size // lanes, dim, lanes).transpose(3, 4)
    numbers = [side.reshape(len(raw), -1, page_size, dim).transpose(1, 2) for side in (keys, values)]
    halves = raw[..., 2 * size :].contiguous().view(torch.float16).view(*raw.shape[:2], 2, num_scales, page_size)
    return list(zip(numbers, halves.permute(2, 0, 4, 1, 3), strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("page_size", [5, 16, 48])
def test_q8_0_stores_the_bytes_of_ggml(page_size: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    bench = Bench(make_ops(BASE, dtype), 20, page_size, "q8_0")
    batch = step_batch([0], [67], page_size)
    qkv = randn(67, 8, 32, seed=3) * torch.logspace(-12, 4, 67)[:, None, None]
    ties = torch.arange(32) + 0.5
    qkv[0], qkv[1], qkv[2] = 0.0, torch.where(ties < 31, ties, 127.0), -torch.where(ties < 31, ties, 127.0)
    qkv[3, :, 5], qkv[4, :, 31] = 1e6, -3e-5
    qkv = qkv.to(dtype)
    step = bench.ops.begin_step(batch, batch.input_ids)
    bench.ops.rotate_and_store(bench.put("_qkv", qkv.flatten(1)), step, PLAIN)
    places = torch.arange(67)
    pages = torch.from_numpy(batch.page_table[0].astype(np.int64))[places // page_size]
    sides = zip(stored_blocks(bench.ops, page_size), qkv[:, 4:].chunk(2, dim=1), strict=True)
    for (numbers, scales), exact in sides:
        expected_numbers, expected_scales = quantise_exactly(exact)
        assert torch.equal(scales[pages, places % page_size], expected_scales)
        assert torch.equal(numbers[pages, places % page_size], expected_numbers)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_lost_in_q8_0(bad: float, side: str, make_ops: MakeOps) -> None:
    bench = Bench(make_ops(BASE), 8, 16, "q8_0")
    batch = step_batch([0, 0], [40, 40], 16)
    qkv = randn(80, 8, 32, seed=3)
    qkv[5, 4 if side == "key" else 6, 7] = bad
    step = bench.ops.begin_step(batch, batch.input_ids)
    array = bench.put("_qkv", qkv.flatten(1))
    bench.ops.rotate_and_store(array, step, PLAIN)
    attended = bench.get("_attended", bench.ops.attention(array, step, PLAIN), 80).view(80, 4, 32)
    spoilt = attended.isnan().any(dim=2)
    assert spoilt[5:40, :2].all()
    assert not spoilt[40:].any()
    assert not spoilt[:, 2:].any()


def check_attention(
    bench: Bench,
    config: DecoderConfig,
    dtype: torch.dtype,
    kv_dtype: str,
    contexts: list[int],
    lengths: list[int],
    page_size: int,
    window: int | None = None,
) -> None:
    """Writes the contexts in one step, then attends with the queries of the next, all values random."""
    ops, shape = bench.ops, (config.num_heads, config.num_kv_heads, config.head_dim)
    num_heads, kv_heads, dim = shape
    layer = replace(PLAIN, window_tokens=window)
    whole = step_batch([0] * len(contexts), [c + n for c, n in zip(contexts, lengths, strict=True)], page_size)
    qkv = randn(whole.num_tokens, (num_heads + 2 * kv_heads) * dim, dtype=dtype, seed=3)
    step = ops.begin_step(whole, whole.input_ids)
    ops.rotate_and_store(bench.put("_qkv", qkv), step, layer)

    ends = whole.query_starts[1:]
    tokens = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)])
    batch = replace(
        whole,
        input_ids=np.zeros(len(tokens), np.int32),
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
    )
    step = ops.begin_step(batch, batch.input_ids)
    found = bench.get("_attended", ops.attention(bench.put("_qkv", qkv[tokens]), step, layer), len(tokens))

    exact = []
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        own = qkv[whole.query_starts[row] : ends[row]].view(-1, num_heads + 2 * kv_heads, dim)
        k, v = (as_cached(x, kv_dtype) for x in own[:, num_heads:].chunk(2, dim=1))
        exact += [attend_exactly(own[p, :num_heads], k, v, p, window) for p in range(context, context + length)]
    # The kernels multiply a q8_0 cache with queries and weights of 16 bits.
    tolerance = 1e-4 if kv_dtype == "q8_0" else 1e-5
    rounded = BF16 if dtype is BF16 or kv_dtype == "bf16" else FP32
    close(found.view(-1, num_heads, dim), torch.stack(exact), rounded, tolerance)


DTYPES = [(dtype, kv_dtype) for dtype in (FP32, BF16) for kv_dtype in ("fp32", "bf16", "q8_0")]


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 16, 32, 48, 64, 80])
def test_attention_over_pages_of_any_size(page_size: int, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps) -> None:
    """Decode and prefill rows in one step, with lengths about a page and about a block of 64."""
    near = [max(n + page_size * k - 1, 0) for k in (0, 1, 2) for n in (0, 1, 2)]
    contexts = [*near, 0, 62, 63, 64, 65, 130, 3]
    lengths = [*([1] * len(near)), 1, 1, 1, 2, 30, 7, 70]
    for window in (None, 9):
        bench = Bench(make_ops(BASE, dtype), 700, page_size, kv_dtype)
        check_attention(bench, BASE, dtype, kv_dtype, contexts, lengths, page_size, window)


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 32])
def test_attention_of_any_shape_of_heads(
    group: int, head_dim: int, dtype: torch.dtype, kv_dtype: str, make_ops: MakeOps
) -> None:
    if kv_dtype == "q8_0":
        head_dim = -(-head_dim // 32) * 32
    config = replace(BASE, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    bench = Bench(make_ops(config, dtype), 64, 16, kv_dtype)
    check_attention(bench, config, dtype, kv_dtype, [0, 5, 100, 70, 12], [1, 1, 1, 20, 33], 16)


@pytest.mark.parametrize("window", [None, 300, 700])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, "fp32"), (FP32, "q8_0"), (BF16, "bf16"), (BF16, "q8_0")])
def test_attention_over_long_contexts(dtype: torch.dtype, kv_dtype: str, window: int | None, make_ops: MakeOps) -> None:
    """So long that the kernels begin softmax anew on the way, and let several threads take one row."""
    for contexts, lengths in (([1500], [1]), ([2047, 3, 512], [1, 1, 1]), ([511, 1000, 0], [1, 40, 600])):
        bench = Bench(make_ops(BASE, dtype), 160, 32, kv_dtype)
        check_attention(bench, BASE, dtype, kv_dtype, contexts, lengths, 32, window)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0"])
def test_a_long_row_is_the_same_bits_whoever_takes_its_pieces(
    kv_dtype: str, window: int | None, make_kernels: MakeOps
) -> None:
    """By one thread or many, alone or beside a row so long that its own is not worth cutting, prefilled or decoded."""
    layer = replace(PLAIN, window_tokens=window)
    qkv = randn(1300 + 6000, 8 * 32, dtype=BF16)
    found = []
    for num_threads in (1, 2, 7):
        bench = Bench(make_kernels(BASE, BF16, num_threads), 300, 32, kv_dtype)
        whole = step_batch([0, 0], [1300, 6000], 32)
        step = bench.ops.begin_step(whole, whole.input_ids)
        array = bench.put("_qkv", qkv)
        bench.ops.rotate_and_store(array, step, layer)
        found.append(bench.get("_attended", bench.ops.attention(array, step, layer), 1300)[1299])
        for rows in ([0], [0, 1]):
            ends = whole.query_starts[1:][rows]
            batch = replace(
                whole,
                input_ids=np.zeros(len(rows), np.int32),
                query_starts=np.arange(len(rows) + 1, dtype=np.int32),
                context_lens=np.array([1299, 5999], np.int32)[rows],
                page_table=whole.page_table[rows],
                logit_rows=np.arange(len(rows), dtype=np.int32),
            )
            step = bench.ops.begin_step(batch, batch.input_ids)
            array = bench.put("_qkv", qkv[ends - 1])
            found.append(bench.get("_attended", bench.ops.attention(array, step, layer), 1)[0])
        bench.ops.close()
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rotary_dim", [8, 24, 32, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_are_normed_and_rotated(normed: bool, rotary_dim: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    rope = RopeConfig(rotary_dim, tuple(100.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)), 1.25)
    config = replace(BASE, head_dim=64, rope=rope)
    bench = Bench(make_ops(config, dtype), num_pages=8)
    batch = step_batch([0, 30], [5, 9], 16)
    qkv = randn(14, 8 * 64, dtype=dtype)
    norm = randn(64, seed=5) if normed else None
    vector = None if norm is None else bench.ops.vector(norm)
    layer = AttentionLayer(0, uses_rope=True, window_tokens=None, q_norm=vector, k_norm=vector)
    step = bench.ops.begin_step(batch, batch.input_ids)
    array = bench.put("_qkv", qkv)
    bench.ops.rotate_and_store(array, step, layer)

    heads = qkv.view(14, 8, 64)[:, :6].double()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(dim=2, keepdim=True) + config.rms_norm_eps) * norm.double()
    positions = torch.tensor([*range(5), *range(30, 39)], dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(rope.inv_freq, dtype=torch.float64)).unsqueeze(1)
    cos, sin = angles.cos() * 1.25, angles.sin() * 1.25
    x, y = heads[..., :rotary_dim].chunk(2, dim=2)
    exact = torch.cat([x * cos - y * sin, y * cos + x * sin, heads[..., rotary_dim:]], dim=2)
    close(bench.get("_qkv", array, 14).view(14, 8, 64)[:, :6], exact, dtype)


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_native_results_are_the_same_bits_with_any_number_of_threads(num_threads: int) -> None:
    """Many small jobs one after the other, so that threads meet in every order."""
    x, weight = randn(7, BASE.hidden_size, dtype=BF16), randn(2000, BASE.hidden_size, dtype=BF16, seed=1)
    config = replace(BASE, vocab_size=2000)
    results = []
    for threads in (1, num_threads):
        bench = Bench(make_native_ops(config, BF16, threads))
        bench.begin(7)
        packed = bench.ops.pack_linear(weight, None)
        array = bench.put("_hidden", x)
        results.append([bench.ops.logits(array, packed).copy() for _ in range(300 if threads > 1 else 1)])
        bench.ops.close()
    for found in results[1]:
        np.testing.assert_array_equal(found, results[0][0])
