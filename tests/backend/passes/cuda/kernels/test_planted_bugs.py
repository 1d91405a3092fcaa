"""The cases' comparisons with float64 find a bug in a kernel: windows, sinks, quantised products, rounding, experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, Experts
from penstock.backend.passes.cuda.attention.prefill_segments import whole_tiles
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.cases import sampler
from penstock.tools.gpu.cases.attention import decode, prefill
from penstock.tools.gpu.cases.attention.paged_rows import STEEP_TOLERANCE, Row
from penstock.tools.gpu.cases.check import Mismatch, require_within
from penstock.tools.gpu.cases.elementwise import (
    StoreCase,
    check_added_norm,
    check_layer_norm,
    check_norm,
    check_store,
)
from penstock.tools.gpu.cases.products import row_products
from penstock.tools.gpu.cases.products.experts import ExpertsCase, check_experts
from penstock.tools.gpu.cases.products.quantized import LinearCase, check_embedding, check_linear
from penstock.tools.gpu.cases.products.rounded import check_rounded
from tests.cuda_emulator.planting import VARIABLE, Bug, PlantedLauncher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backend.passes.cuda.device.launcher import Launcher

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Planted:
    """A check that passes with the sound kernels of `sources` and finds each of the bugs.

    No bug may make a kernel leave its tensors' memory, because the emulator's fast mode does not notice.
    """

    sources: tuple[str, ...]
    check: Callable[[Launcher], object]
    bugs: tuple[Bug, ...]


def check_decode(launcher: Launcher, kv_dtype: str) -> None:
    """Windows that begin within a page and a chunk, and a context so short that the sink has much of the weight; a
    context of more chunks than a warp has lanes, with peaks that differ, and more heads than are merged at a time;
    blocks that work through several chunks."""
    long = [Row(256 * 33, 1, 3, is_steep=True)]
    for window, group, rows in ((300, 2, decode.rows_of(301, 617, 2)), (0, 9, long), (0, 2, decode.rows_of(2600))):
        attention = decode.attention_of(64, kv_dtype, kv_heads=1, group=group, window=window, max_context=1 << 17)
        case = decode.DecodeCase.of(attention, rows)
        require_within("an output", case.error(case.run(launcher)), decode.TOLERANCE[decode.ACT_OF[kv_dtype]])


def check_prefill(launcher: Launcher, kv_dtype: str) -> None:
    """With a warp's tokens, and a tile's, that end within a picture, before keys of another tile."""
    for window, *shapes in ((70, (208, 70), (0, 75)), (0, (2040, 20)), (-1, (96, 60), (10, 90))):
        attention = prefill.attention_of(64, kv_dtype, group=2, window=max(window, 0), sees_ahead=window < 0)
        step = prefill.prepare(attention, prefill.rows_of(*shapes))
        error = prefill.error_of(attention, step, prefill.run(attention, step, launcher))
        require_within("of a query", error, prefill.TOLERANCE[kv_dtype])


def check_wgmma(launcher: Launcher) -> None:
    """A window that begins within a tile, and a context of several segments in one block."""
    for window, row in ((70, Row(208, 70, 1)), (0, Row(4090, 9, 2))):
        attention = prefill.attention_of(128, group=2, window=window, has_wgmma=True, num_sms=1)
        step = prefill.prepare(attention, [row])
        tiles = whole_tiles(np.array([[0, 0], [0, 128]][: 1 + (row.length > 64)], np.int32))
        error = prefill.error_of(attention, step, prefill.run(attention, step, launcher, tiles=tiles))
        require_within("of a query", error, prefill.TOLERANCE["bf16"])


def check_segments(launcher: Launcher) -> None:
    """A context of several segments in one block, and in a block for each."""
    attention = prefill.attention_of(64, group=2)
    steep = Row(2100, 1, 5, is_steep=True)
    for row, tolerance in ((Row(4095, 3, 1), prefill.TOLERANCE), (steep, STEEP_TOLERANCE)):
        step = prefill.prepare(attention, [row])
        for tiles in (None, whole_tiles(np.array([[0, 0]], np.int32))):
            error = prefill.error_of(attention, step, prefill.run(attention, step, launcher, tiles=tiles))
            require_within("of a query", error, tolerance["bf16"])


def check_cuts(launcher: Launcher, *, has_wgmma: bool = False) -> None:
    prefill.check_segments(launcher, prefill.attention_of(64, group=1, has_wgmma=has_wgmma), ((4095, 3),))


def check_weights(launcher: Launcher, form: str) -> None:
    """An odd number of outputs and inputs that fill no chunk; products, and a table's rows."""
    case = LinearCase(form, 24, 256 if form == "q6_k" else 288, 5, BF16, has_bias=True, scale=0.5)
    check_linear(launcher, case)
    check_embedding(launcher, case)


def check_rounding(launcher: Launcher, form: str) -> None:
    scale = 0.5 if form == "int8" else 1.0  # the library has no product of E4M3 with another one
    check_rounded(launcher, LinearCase(form, 32, 200, 260, BF16, has_bias=True, scale=scale))


def check_stored_experts(launcher: Launcher) -> None:
    """Groups of more than one tile."""
    gpt_oss = Experts(3, 2, 32, normalises=True, biased=True, clamped_gate=ClampedGate(1.7, 0.5))
    check_experts(launcher, ExpertsCase(gpt_oss, 64, 110, BF16, stored="mxfp4"))


def check_rows(launcher: Launcher) -> None:
    for check in row_products.CHECKS:
        check(launcher, row_products.CASES["small"])
        check(launcher, replace(row_products.CASES["full"], num_rows=9))
    row_products.check_company(launcher, replace(row_products.CASES["full"], num_rows=9))


def check_norms(launcher: Launcher) -> None:
    """Rows of which some threads hold two chunks, and others one."""
    for check in (check_norm, check_layer_norm, check_added_norm):
        check(launcher, BF16, hidden=4360)


def check_head_norms(launcher: Launcher) -> None:
    """Heads that do not fill their lanes."""
    check_store(launcher, StoreCase(HeadShape(4, 2, 80), "bf16", 16, 80), BF16, norms=True, centres=True)


def check_sampling(launcher: Launcher) -> None:
    """Filters with a list of the tokens that may pass, with a wrong one, and without; draws of rows with and without
    filters; what is in the list."""
    for params in (sampler.FILTERS[3], sampler.FILTERS[-1]):
        for max_listed in (sampler.MAX_LISTED, 0):
            sampler.check_thresholds(launcher, params, max_listed=max_listed, blocks_to_fill=1)
    for max_listed in (sampler.MAX_LISTED, 0):
        sampler.check_fallback(launcher, max_listed)
    sampler.check_list(launcher, 64_000, 0, 3000)
    sampler.check_misjudged_rows(launcher)
    sampler.check_noise(launcher)
    sampler.check_ties(launcher, draws=100)  # last: it takes as long as the others


ITEMS, KV_STREAM, SINKS = "decode_items.cuh", "decode_stream.cuh", "sinks.cuh"
WEIGHTS, PRODUCTS, ROWS = "quantised_weights.cuh", "quantised_products.cu", "rounded_rows.cu"
_WINDOW, _SINK = "max(length - window, 0)", "ex2_approx(sink * kLog2E - peak)"
DECODE = (
    Bug(ITEMS, _WINDOW, "max(length - window - 1, 0)"),
    Bug(ITEMS, _WINDOW, "max(length - window + 1, 0)"),
    Bug(ITEMS, "(length - first + chunk_tokens - 1) / chunk_tokens", "max((length - first) / chunk_tokens, 1)"),
    Bug(SINKS, _SINK, "0.0f"),
    Bug(SINKS, _SINK, "ex2_approx(sink - peak)"),
    Bug("decode_attention.cu", "reduce_lanes(peak, 32, Largest{})", "peak"),
    Bug("decode_attention.cu", "reduce_lanes(merged.sum, 32, Sum{})", "merged.sum"),
    Bug("decode_attention.cu", "__shfl_sync(kWholeWarp, own_factor, i)", "own_factor"),
    Bug("decode_attention.cu", "fmaf(own_factor, own.y, merged.sum)", "own_factor * own.y"),
    Bug("decode_attention.cu", "results.merge_warps(work, kMergeHeads, warp_rows, warp_peaks)",
        "results.merge_warps(work, 0, warp_rows, warp_peaks)"),
    Bug(KV_STREAM, "i & 1", "0"),
)  # fmt: skip
HEADS, KV_TILES = "decode_heads_mma.cuh", "decode_tiles.cuh"
DECODE_Q8 = (
    Bug(HEADS, "-kRaised * reduce_lanes(sums[e / 2], 4, Sum{})", "-1024.0f * reduce_lanes(sums[e / 2], 4, Sum{})"),
    Bug(HEADS, "kIsWide ? 0.0f : query_sums[kIsWide ? 0 : block][e]", "query_sums[0][e]"),
    Bug(HEADS, "scales.of_token(i, 1, block)", "scales.of_token(i, 0, block)"),
    Bug(HEADS, "mul_f16x2(weights[i / 2][i % 2 * 2], pair)", "weights[i / 2][i % 2 * 2]"),
    Bug(KV_TILES, "token + lane >= end", "false"),
    Bug(KV_TILES, "words[i][second / 2]", "words[i][block / 2]"),
    Bug(KV_TILES, "target + first / kRowPieces * kRowStride", "target"),
)
PREFILL_SINKS = (Bug(SINKS, _SINK, "0.0f"), Bug(SINKS, _SINK, "ex2_approx(sink - peak)"))
MMA, FP32 = "prefill_attention.cu", "prefill_attention_fp32.cu"
_BEGIN, _LAST_SEEN = "max(0, tile.position(0) - step.window + 1)", "tile.last_seen(kQueryRows - 1) + 1"
PREFILL = (
    Bug("prefill_masks.cuh", "column <= position - window", "column < position - window"),
    Bug("prefill_masks.cuh", "column <= position - window", "column <= position - window + 1"),
    Bug(MMA, "last > warp_first - step.window", "first > warp_first - step.window"),
    Bug(MMA, "first > warp_last - step.window", "last > warp_last - step.window"),
    Bug("prefill_segments.cuh", _BEGIN, "max(0, tile.position(0) - step.window + 2)"),
    Bug(MMA, "tile.last_seen(warp_row)", "step.window"),
    Bug(MMA, "tile.last_seen(warp_row + kWarpRows - 1)", "warp_last"),
    Bug("prefill_masks.cuh", "column > last", "column > position"),
    Bug("prefill_segments.cuh", _LAST_SEEN, "tile.position(kQueryRows - 1) + 1"),
    *PREFILL_SINKS,
)
SEGMENTS = (
    Bug("prefill_segments.cuh", "__fmaf_rn(older, older_factor, __fmul_rn(newer, newer_factor))",
        "__fmaf_rn(older, newer_factor, __fmul_rn(newer, older_factor))"),
    Bug("prefill_segments.cuh", "ex2_approx((older - base) * to_log2)", "1.0f"),
    Bug("prefill_segments.cuh", "lane & 28", "0"),
    Bug("prefill_segments.cuh", "has_older ? pair[4 * c] : make_float2(0.0f, 0.0f)", "make_float2(0.0f, 0.0f)"),
    Bug("prefill_segments.cuh", "results.peaks[first + segment * stride]", "results.peaks[first]"),
    Bug(MMA, "stop > kShortestSegment", "false"),
    Bug("prefill_segments.cuh", "slot - segment_number(range.part)", "slot"),
    Bug("prefill_products.cuh", "(top - reference) * to_log2 > kSlack", "top > reference && reference == -infinity()"),
    Bug("prefill_tile.cuh", "position / kRun", "position / kRun / 2"),
    Bug("prefill_tile.cuh", "position % kSpan != 0 || position <= begin", "position % kSpan != 0"),
)  # fmt: skip
CLAIMS = (
    Bug("product_claims.cuh", "unsigned(num_tiles - num_blocks - 1)", "unsigned(num_tiles - num_blocks)"),
    Bug("product_claims.cuh", "2 * num_blocks + int(claimed)", "2 * num_blocks + int(claimed) + 1"),
    Bug("product_claims.cuh", "chunk + kStreamWarps < num_chunks", "true"),
)
WGMMA, RING, TASKS = "prefill_attention_wgmma.cu", "prefill_ring.cuh", "prefill_tasks.cuh"
PREFILL_WGMMA = (
    Bug(WGMMA, "token + kTokens - 1 <= first && token > last - window", "token + kTokens - 1 <= first"),
    Bug(WGMMA, "token <= last && token + kTokens - 1 > first - window", "token <= last && token > first - window"),
    Bug(WGMMA, "step / 4 * kHalfBytes + column_bytes", "column_bytes"),
    Bug(WGMMA, "stop > kShortestSegment", "false"),
    Bug(RING, "first < begin || first + kTokens > length", "first < begin"),
    Bug(RING, "first < begin || first + kTokens > length", "first + kTokens > length"),
    Bug(RING, "half * 64", "0"),
    Bug(TASKS, "unsigned(num_tasks - 1)", "unsigned(num_tasks)"),
    Bug(TASKS, "int(__shfl_sync(kWholeWarp, claimed, 0))", "int(__shfl_sync(kWholeWarp, claimed, 0)) + 1"),
    Bug("prefill_products.cuh", "chunk % 8 ^ row % 8", "chunk % 8"),
)
_STOP = "min(end, segment_end(first))"
CUTS = (  # results stay right, but their bits depend on the number of blocks
    Bug("prefill_segments.cuh", _STOP, "min(end, segment_end(first) + (first > 0 ? kShortestSegment : 0))"),
)
PREFILL_FP32 = (
    Bug(FP32, "token <= positions[r] - step.window", "token < positions[r] - step.window"),
    Bug(FP32, "token <= positions[r] - step.window", "token <= positions[r] - step.window + 1"),
    Bug(FP32, _BEGIN, "max(0, tile.position(0) - step.window + 2)"),
    Bug(FP32, "token > last_seen[r]", "token > positions[r]"),
    Bug(FP32, _LAST_SEEN, "tile.position(kQueryRows - 1) + 1"),
    *PREFILL_SINKS,
)
GROUP = Bug(WEIGHTS, "scales[i][step * kStepInputs / GROUP]", "scales[i][0]")
ROW_GROUP = Bug(WEIGHTS, "output * weights.num_groups() + input / GROUP", "output * weights.num_groups()")
CHUNK = Bug(WEIGHTS, "scale_rows[i][first + group]", "scale_rows[i][group]")
BIAS = Bug(PRODUCTS, "product + to_float(bias[before + output])", "product")
INT4 = (
    Bug(WEIGHTS, "zeros[i][step * kStepInputs / GROUP]", "zeros[i][0]"),
    Bug(WEIGHTS, "0xc300c300u + zero * 0x10001u", "0xc300c300u + zero"),
    GROUP,
    ROW_GROUP,
    CHUNK,
    BIAS,
)
INT8 = (
    Bug(WEIGHTS, "pair & 0x00800080u", "pair & 0x00000080u"),
    Bug(WEIGHTS, "prmt(high, 0, 0x4342)", "prmt(low, 0, 0x4342)"),
    Bug(PRODUCTS, "weights.scales[output]", "weights.scales[0]"),
    BIAS,
)
MXFP4 = (
    Bug(WEIGHTS, "mul_bf16x2((pair & 0x00070007u) << 6 | (pair & 0x00080008u) << 12, 0x7e807e80u)",
        "mul_bf16x2((pair & 0x00070007u) << 6, 0x7e807e80u)"),
    Bug(WEIGHTS, "unsigned(x.exponent) << 23", "unsigned(x.exponent + 1) << 23"),
    GROUP,
    CHUNK,
)  # fmt: skip
FP8_BLOCKS = (
    Bug(WEIGHTS, "widen_floats(Act{}, high >> 16)", "widen_floats(Act{}, high & 0xffffu)"),
    CHUNK,
    Bug(WEIGHTS, "chunk * kRowChunkInputs / GROUP", "chunk"),
    ROW_GROUP,
)
_SCALED = "pack(Act{}, low * scale - minimum, high * scale - minimum)"
_MULTIPLIER = "static_cast<signed char>(multipliers[0])"
BLOCKS = (
    Bug(WEIGHTS, _SCALED, "pack(Act{}, low * scale + minimum, high * scale + minimum)"),
    Bug(WEIGHTS, _SCALED, "pack(Act{}, low * scale, high * scale)"),
    Bug(WEIGHTS, "chunk * kRowChunkInputs + step * kStepInputs + lane % 4 * 8", "chunk * kRowChunkInputs"),
    Bug(WEIGHTS, "output * (filled >> block_shift) + (input >> block_shift)", "output * (filled >> block_shift)"),
)
MULTIPLIERS = (
    Bug(WEIGHTS, _MULTIPLIER, "multipliers[0]"),
    Bug(
        WEIGHTS,
        "output * (filled >> group_shift) + (input >> group_shift)",
        "output * (filled >> group_shift) + (input >> block_shift)",
    ),
)
ROUNDED = (
    Bug(ROWS, "__float_as_uint(numbers[j]) & 0x7fffffffu", "__float_as_uint(fmaxf(numbers[j], 0.0f))"),
    Bug(ROWS, "is_finite ? 0.0f : __uint_as_float(0x7fffffffu)", "0.0f"),
    Bug(ROWS, "lane * 16 + step * 8", "lane * 8 + step * 32"),
    Bug(ROWS, "kLargestNumber / peak", "0.5f * kLargestNumber / peak"),
)
ROUNDED_INT8 = (
    Bug(ROWS, "rintf(numbers[j] * factor)", "floorf(numbers[j] * factor)"),
    Bug(ROWS, "float(at[j]) * of_row * of_output[j] + biases[j]", "float(at[j]) * of_row * of_output[0] + biases[j]"),
    Bug(ROWS, "float(at[j]) * of_row * of_output[j] + biases[j]", "float(at[j]) * of_row * of_output[j]"),
)
EXPERTS = (
    Bug("expert_tiles.cuh", "(number - earlier) * kTileRows", "(number - earlier) * (kTileRows + 1)"),
    Bug(PRODUCTS, "tokens[tile.first + row]", "tokens[tile.first]"),
    Bug("experts.cu", "chosen[first + rank]", "chosen[first]"),
    Bug("experts.cu", "up + 1.0f", "up"),
    Bug("experts.cu", "places[first + rank]", "first + rank"),
)
STREAM, TILES, ROW_SOURCES = "product_stream.cuh", "product_tiles.cuh", ("row_products.cu", "qkv_product.cu")
ROW_PRODUCTS = (
    Bug(STREAM, "cp_async_wait<kRingChunks - 2>()", "cp_async_wait<kRingChunks - 1>()"),
    Bug(STREAM, "chunk * kChunkInputs + step * kStepInputs + t * 8", "chunk * kChunkInputs + step * kStepInputs"),
    Bug(STREAM, "row * kSumStride + column", "column"),
    Bug(TILES, "columns.of_lane(i)", "columns.of_lane(0)"),
    Bug("row_weights.cuh", "reduce_lanes(sums[i], 32, Sum{}) / float(inputs)", "sums[i] / float(inputs)"),
    Bug("row_weights.cuh", "(has_bias ? product + to_float(bias[output]) : product) * scale", "product * scale"),
    Bug("row_products.cu", "y * norm[output]", "y"),
    Bug("row_products.cu", "reduce_lanes(y * y, kTileOutputs, Sum{})", "reduce_lanes(y * y, 8, Sum{})"),
    Bug("row_products.cu", "linear.finish(sum_of(sums, row, column + kHalf), factors[row], width + output)",
        "linear.finish(sum_of(sums, row, column + kHalf), factors[0], width + output)"),
    Bug("row_products.cu", "width - kHalf", "width"),
    Bug("qkv_product.cu", "unsigned(head_dim / kTileOutputs - 1)", "unsigned(head_dim / kTileOutputs - 2)"),
    Bug("qkv_product.cu", "tickets + head", "tickets"),
    Bug("qkv_product.cu", "row_slots[row] >= 0 ? context_lens[row] : 0", "row_slots[row] >= 0 ? context_lens[0] : 0"),
)  # fmt: skip
NORMS = (
    Bug("norms.cu", "weights[i][j]", "weights[0][j]"),
    Bug("norms.cu", "biases[i][j]", "biases[0][j]"),
    Bug("norms.cu", "added[i][j]", "added[0][j]"),
    Bug("norms.cu", "chunk < hidden / 8", "chunk < hidden / 8 - 1"),
    Bug("norms.cu", "(sum[i][j] + x[i][j]) * factor", "x[i][j] * factor"),
)
SAMPLING, FILTERING, THRESHOLDS = "sampling.cuh", "filters.cu", "thresholds.cuh"
SAMPLED = (
    Bug(THRESHOLDS, "key >> bits_below >> 10 != prefix", "false"),
    Bug(THRESHOLDS, "target - before", "target"),
    Bug(THRESHOLDS, "prefix << 10 | unsigned(threadIdx.x * kBinsEach + i)", "unsigned(threadIdx.x * kBinsEach + i)"),
    Bug(THRESHOLDS, "whole > 0 ? whole : total", "total"),
    Bug(THRESHOLDS, "float(one) * scaled", "float(one)"),
    Bug(THRESHOLDS, "before + added < before", "false"),
    Bug(THRESHOLDS, "unsigned(content >> 32)", "0u"),
    Bug(THRESHOLDS, "counts[i] * float(total) * rcp_approx(farther - 0.5f * counts[i])", "float(counts[i])"),
    Bug(THRESHOLDS, "(bin + 1u << kKeyBits)", "(unsigned(bin) << kKeyBits)"),
    Bug(THRESHOLDS, "params.largest_gap", "0.5f * params.largest_gap"),
    Bug(FILTERING, "reach >= kLargestFloat", "false"),
    Bug(FILTERING, "threshold < kept.deviation(at_reach)", "true"),
    Bug(FILTERING, "is_first ? sums.mass : 0", "sums.mass"),
    Bug(SAMPLING, "each(first + turn * kTurnTokens, x[0])", "each(first, x[0])"),
    Bug(FILTERING, "entries[j]", "entries[0]"),
    Bug(FILTERING, "first + place_of(top, drawn)", "first"),
    Bug(FILTERING, "kept.has(x[j]) ? x[j] : -infinity()", "x[j]"),
    Bug(FILTERING, "!(kept.gap(x[j]) <= params.largest_gap)", "false"),
    Bug(FILTERING, "kept.gap(x) <= params.largest_gap", "true"),
    Bug(FILTERING, "best_of_row != 0 ? best_of_row : likeliest_of_row", "best_of_row"),
    Bug("sampling.cu", "atomicAdd(&state.num_listed, count)", "atomicAdd(&state.num_listed, 1u)"),
    Bug("sampling.cu", "list(atomicAdd(&state.num_listed, 1u), entry)", "list(0u, entry)"),
    Bug("sampling.cu", "staged.entries[i]", "staged.entries[0]"),
    Bug(SAMPLING, "token & 2 ? high : low", "low"),
    Bug(SAMPLING, "unsigned(first) / 4 + half", "unsigned(first) / 4"),
    Bug(SAMPLING, "(0.01f + 2e-6f * (fabsf(best_score) + 32.0f))", "-4.0f"),
    Bug(SAMPLING, "blockIdx.x * segment", "0"),
)
HEAD_NORMS = (
    Bug("rope_heads.cuh", "is_centred ? place * head_dim : 0", "0"),
    Bug("rope_heads.cuh", "lane * 8 < head_dim ? x[j] - mean : 0.0f", "x[j] - mean"),
    Bug("rope_heads.cuh", "is_value ? 0 : head - num_heads", "0"),
)
PLANTED = {
    "head norms": Planted(("rope_and_store.cu",), check_head_norms, HEAD_NORMS),
    "norms": Planted(("norms.cu",), check_norms, NORMS),
    "decode": Planted(("decode_plan.cu", "decode_attention.cu"), partial(check_decode, kv_dtype="bf16"), DECODE),
    "decode q8_0": Planted(
        ("decode_plan.cu", "decode_attention.cu"), partial(check_decode, kv_dtype="q8_0"), DECODE_Q8
    ),
    "prefill": Planted((MMA,), partial(check_prefill, kv_dtype="bf16"), PREFILL),
    "prefill with warpgroups": Planted((WGMMA,), check_wgmma, PREFILL_WGMMA),
    "prefill segments": Planted((MMA,), check_segments, SEGMENTS),
    "cuts of prefill": Planted((MMA,), check_cuts, CUTS),
    "cuts of prefill with warpgroups": Planted((WGMMA,), partial(check_cuts, has_wgmma=True), CUTS),
    "prefill in fp32": Planted((FP32,), partial(check_prefill, kv_dtype="fp32"), PREFILL_FP32),
    "int4": Planted((PRODUCTS,), partial(check_weights, form="int4"), INT4),
    "int8": Planted((PRODUCTS,), partial(check_weights, form="int8"), INT8),
    "mxfp4": Planted((PRODUCTS,), partial(check_weights, form="mxfp4"), MXFP4),
    "fp8-128": Planted((PRODUCTS,), partial(check_weights, form="fp8-128"), FP8_BLOCKS),
    "q4_1": Planted((PRODUCTS,), partial(check_weights, form="q4_1"), BLOCKS),
    "q6_k": Planted((PRODUCTS,), partial(check_weights, form="q6_k"), MULTIPLIERS),
    "rounded int8": Planted((ROWS,), partial(check_rounding, form="int8"), (*ROUNDED, *ROUNDED_INT8)),
    "rounded fp8": Planted((ROWS,), partial(check_rounding, form="fp8"), ROUNDED),
    "rows": Planted(ROW_SOURCES, check_rows, ROW_PRODUCTS),
    "claims": Planted(
        ("row_products.cu",), partial(row_products.check_claims, case=row_products.CLAIMED["bf16"]), CLAIMS
    ),
    "sampling": Planted(("sampling.cu", FILTERING), check_sampling, SAMPLED),
    "experts": Planted((PRODUCTS, "experts.cu"), check_stored_experts, EXPERTS),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_each_planted_bug_is_found(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = PlantedLauncher(tmp_path, planted.sources, planted.bugs)
    planted.check(launcher)  # without a bug the copy is sound
    missed = []
    for number, bug in enumerate(planted.bugs):
        monkeypatch.setenv(VARIABLE, str(number))
        try:
            planted.check(launcher)
        except Mismatch:
            continue
        missed.append(str(bug))
    assert not missed
