"""The bytes that each implementation writes to the paged cache: q8_0 bytes, normalised and rotated heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from penstock.backend.checkpoint.config.decoder_config import NormKind, PositionScale, QkNormScope, RopeConfig
from penstock.backend.passes.cpu.in_torch.paged_cache import Q8KvPages
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.ops.interface import AttentionLayer
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


def quantise_exactly(x: Tensor) -> tuple[Tensor, Tensor]:
    """GGML's q8_0 of x [..., dim]: int8 [..., dim] and binary16 [..., dim / 32]. All operations in fp32, as in GGML."""
    blocks = x.float().numpy().reshape(*x.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = (blocks * inverse).astype(np.float64)
    numbers = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8)
    return torch.from_numpy(numbers.reshape(x.shape)), torch.from_numpy(scale[..., 0].astype(np.float16))


def stored_blocks(ops: Any, page_size: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values: int8 [pages, page_size, kv_heads, dim], and one scale per 32 dimensions."""
    if not isinstance(ops, NativeOps):
        heads: list[Q8KvPages] = [ops.cache.keys[0], ops.cache.values[0]]
        return [
            (side.numbers.flatten(3).permute(1, 2, 0, 3), side.scales.squeeze(4).permute(1, 2, 0, 3)) for side in heads
        ]
    dim, num_scales, lanes = BASE.head_dim, BASE.head_dim // 32, 2
    raw = torch.from_numpy(ops.cache.arrays[0]).view(len(ops.cache.arrays[0]), BASE.num_kv_heads, -1)
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
def test_q8_0_stores_the_same_bytes_as_ggml(page_size: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    harness = OpsHarness(make_ops(BASE, dtype), 20, page_size, "q8_0")
    batch = step_batch([0], [67], page_size)
    qkv = randn(67, 8, 32, seed=3) * torch.logspace(-12, 4, 67)[:, None, None]
    ties = torch.arange(32) + 0.5
    qkv[0], qkv[1], qkv[2] = 0.0, torch.where(ties < 31, ties, 127.0), -torch.where(ties < 31, ties, 127.0)
    qkv[3, :, 5], qkv[4, :, 31] = 1e6, -3e-5
    qkv = qkv.to(dtype)
    step = harness.ops.begin_step(batch, batch.input_ids)
    harness.ops.rotate_and_store(harness.put("_qkv", qkv.flatten(1)), step, PLAIN)
    places = torch.arange(67)
    pages = torch.from_numpy(batch.page_table[0].astype(np.int64))[places // page_size]
    sides = zip(stored_blocks(harness.ops, page_size), qkv[:, 4:].chunk(2, dim=1), strict=True)
    for (numbers, scales), exact in sides:
        expected_numbers, expected_scales = quantise_exactly(exact)
        assert torch.equal(scales[pages, places % page_size], expected_scales)
        assert torch.equal(numbers[pages, places % page_size], expected_numbers)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_q8_0_cache_keeps_values_that_are_not_finite(bad: float, side: str, make_ops: MakeOps) -> None:
    harness = OpsHarness(make_ops(BASE), 8, 16, "q8_0")
    batch = step_batch([0, 0], [40, 40], 16)
    qkv = randn(80, 8, 32, seed=3)
    qkv[5, 4 if side == "key" else 6, 7] = bad
    step = harness.ops.begin_step(batch, batch.input_ids)
    array = harness.put("_qkv", qkv.flatten(1))
    harness.ops.rotate_and_store(array, step, PLAIN)
    attended = harness.get("_attended", harness.ops.attention(array, step, PLAIN), 80).view(80, 4, 32)
    spoilt = attended.isnan().any(dim=2)
    assert spoilt[5:40, :2].all()
    assert not spoilt[40:].any()
    assert not spoilt[:, 2:].any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rotary_dim", [8, 24, 32, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_are_normalised_and_rotated(
    normed: bool, rotary_dim: int, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    rope = RopeConfig(rotary_dim, tuple(100.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)), 1.25)
    config = replace(BASE, head_dim=64, rope=rope)
    harness = OpsHarness(make_ops(config, dtype), num_pages=8)
    batch = step_batch([0, 30], [5, 9], 16)
    qkv = randn(14, 8 * 64, dtype=dtype)
    norm = randn(64, seed=5) if normed else None
    vector = None if norm is None else harness.ops.vector(norm)
    layer = AttentionLayer(0, rope=0, window_tokens=None, q_norm=vector, k_norm=vector)
    step = harness.ops.begin_step(batch, batch.input_ids)
    array = harness.put("_qkv", qkv)
    harness.ops.rotate_and_store(array, step, layer)

    heads = qkv.view(14, 8, 64)[:, :6].double()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(dim=2, keepdim=True) + config.norm_eps) * norm.double()
    positions = torch.tensor([*range(5), *range(30, 39)], dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(rope.inv_freq, dtype=torch.float64)).unsqueeze(1)
    cos, sin = angles.cos() * 1.25, angles.sin() * 1.25
    x, y = heads[..., :rotary_dim].chunk(2, dim=2)
    exact = torch.cat([x * cos - y * sin, y * cos + x * sin, heads[..., rotary_dim:]], dim=2)
    assert_close(harness.get("_qkv", array, 14).view(14, 8, 64)[:, :6], exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("scope", ["head", "each head", "projection"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_queries_and_keys_are_normalised_over_the_norms_scope(
    kind: NormKind, scope: QkNormScope, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    config = replace(BASE, norm=kind, qk_norm=scope)
    harness = OpsHarness(make_ops(config, dtype))
    qkv = randn(5, 8 * 32, dtype=dtype) + 1
    exact = []
    vectors = []
    for first, heads in ((0, 4), (4, 2)):
        x = qkv.view(5, 8, 32)[:, first : first + heads].double()
        groups = x.flatten(1) if scope == "projection" else x
        weight = randn(*(groups.shape[-1:] if scope != "each head" else (heads, 32)), seed=heads)
        normed = layer_norm if kind == "layer" else rms_norm
        exact.append((normed(groups, groups.shape[-1:], eps=BASE.norm_eps) * weight.double()).view(x.shape))
        vectors.append(harness.ops.vector(weight.flatten()))
    batch = step_batch([0], [5], 16)
    array = harness.put("_qkv", qkv)
    layer = AttentionLayer(0, rope=None, window_tokens=None, q_norm=vectors[0], k_norm=vectors[1])
    harness.ops.rotate_and_store(array, harness.ops.begin_step(batch, batch.input_ids), layer)
    assert_close(harness.get("_qkv", array, 5).view(5, 8, 32)[:, :6], torch.cat(exact, dim=1), dtype)


def test_queries_are_multiplied_by_the_scale_of_their_position(make_ops: MakeOps) -> None:
    """Keys are not."""
    rope = replace(BASE.rope, scale=PositionScale(0.3, 8))
    harness = OpsHarness(make_ops(replace(BASE, query_rope=rope)), num_pages=2)
    qkv, batch = randn(20, 8 * 32), step_batch([0], [20], 16)
    found = []
    for layer in (replace(PLAIN, rope=0), replace(PLAIN, index=1, rope=0, query_rope=1)):
        harness.ops.create_cache(2, 2, 16, "fp32")
        step = harness.ops.begin_step(batch, batch.input_ids)
        array = harness.put("_qkv", qkv)
        harness.ops.rotate_and_store(array, step, layer)
        found.append(harness.get("_qkv", array, 20).view(20, 8, 32).double())
    scales = 1 + 0.3 * torch.log(1 + torch.arange(20, dtype=torch.float64).div(8).floor())
    assert_close(found[1][:, :4], found[0][:, :4] * scales[:, None, None], FP32)
    assert torch.equal(found[1][:, 4:], found[0][:, 4:])


@pytest.mark.parametrize("which", [0, 1])
def test_layer_rotates_by_its_own_rope(which: int, make_ops: MakeOps) -> None:
    ropes = [RopeConfig(32, tuple(base ** (-i / 16) for i in range(16))) for base in (100.0, 5.0)]
    harness = OpsHarness(make_ops(replace(BASE, rope=ropes[0], window_rope=ropes[1])))
    qkv, batch = randn(1, 8 * 32), step_batch([7], [1], 16)
    array = harness.put("_qkv", qkv)
    layer = AttentionLayer(0, rope=which, window_tokens=None, q_norm=None, k_norm=None)
    harness.ops.rotate_and_store(array, harness.ops.begin_step(batch, batch.input_ids), layer)
    x, y = qkv.view(1, 8, 32)[:, :6].double().chunk(2, dim=2)
    angles = 7 * torch.tensor(ropes[which].inv_freq, dtype=torch.float64)
    exact = torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], dim=2)
    assert_close(harness.get("_qkv", array, 1).view(1, 8, 32)[:, :6], exact, FP32)
