"""Prefill attention on the emulator equals attention in float64 over the same quantised cache."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cuda.attention.prefill_attention import (
    PrefillAttention,
    kernels,
)
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.tools.gpu.cases.attention import prefill
from penstock.tools.gpu.cases.attention.paged_rows import PagedRows, Row
from penstock.tools.gpu.cases.attention.prefill import TOLERANCE, attention_of, prepare, relative_error, rows_of
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
REVERSE, RANDOM = EmulatedLauncher(order="reverse"), EmulatedLauncher(order="random", seed=3)
CHECKED = (EmulatedLauncher("check"), EmulatedLauncher("check", "reverse"), EmulatedLauncher("check", "random", seed=5))
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KV_DTYPES = tuple(TOLERANCE)
_MACROS = [dict(kernel.macros) for kernel in kernels()]
SHAPES = [*dict.fromkeys((macros["HEAD_DIM"], KV_DTYPES[macros["KV_DTYPE"]]) for macros in _MACROS)]


def run(
    attention: PrefillAttention,
    step: PagedRows,
    launcher: Launcher = FAST,
    first_row: int = 0,
    tiles: NDArray[np.int32] | None = None,
) -> Tensor:
    return prefill.run(attention, step, launcher, first_row, tiles)


def check(
    attention: PrefillAttention, rows: list[Row], launcher: Launcher = FAST, act: torch.dtype | None = None
) -> Tensor:
    step = prepare(attention, rows, act)
    out = run(attention, step, launcher)
    error, limit = prefill.error_of(attention, step, out), TOLERANCE[attention.layout.kv_dtype]
    assert error <= limit, f"{error} > {limit}"
    return out


@pytest.mark.parametrize(("head_dim", "kv_dtype"), SHAPES)
def test_every_head_size_and_cache_equals_float64(head_dim: int, kv_dtype: str) -> None:
    attention = attention_of(head_dim, kv_dtype, kv_heads=2, page_size=32)
    check(attention, rows_of((0, 1), (40, 1), (0, 33), (70, 80)))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_lengths_and_histories_around_page_and_tile_edges_equal_float64(kv_dtype: str, page_size: int) -> None:
    edges = sorted({1, page_size - 1, page_size, page_size + 1, 63, 64, 65})
    shapes = [(0, edge) for edge in edges] + [(edge, 3) for edge in edges] + [(page_size, page_size), (65, 130)]
    check(attention_of(64, kv_dtype, group=1, page_size=page_size), rows_of(*shapes))


@pytest.mark.parametrize(("group", "kv_dtype"), [(group, KV_DTYPES[group % 4]) for group in range(1, 17)])
def test_groups_of_any_size_equal_float64(kv_dtype: str, group: int) -> None:
    check(attention_of(64, kv_dtype, group=group, kv_heads=2), rows_of((0, 1), (30, 2), (17, 40)))


@pytest.mark.parametrize("window", [1, 7, 64, 65, 100])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_windows_read_no_token_before_them(kv_dtype: str, window: int) -> None:
    check(attention_of(64, kv_dtype, window=window), rows_of((0, 150), (208, 70), (129, 1), (5, 3)))


@pytest.mark.parametrize(("head_dim", "kv_dtype"), SHAPES)
def test_tokens_of_pictures_see_them_whole(head_dim: int, kv_dtype: str) -> None:
    for window in (0, 12):
        attention = attention_of(head_dim, kv_dtype, kv_heads=2, page_size=32, window=window, sees_ahead=True)
        check(attention, rows_of((0, 1), (35, 60), (0, 33), (70, 80)))


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_pictures_lie_in_two_segments(kv_dtype: str) -> None:
    """Their last tokens may be in a segment that no token before them reaches. No kernel of warpgroups sees ahead."""
    attention = attention_of(64, kv_dtype, group=3, has_wgmma=True, sees_ahead=True)
    step = prefill.widened(prepare(attention, rows_of((2035, 30), (0, 90))))
    ends = step.visible_ends()
    assert ends[12].item() == 2065
    out = run(attention, step)
    assert prefill.error_of(attention, step, out) <= TOLERANCE[kv_dtype]
    assert torch.equal(run(attention, step, tiles=prefill.one_block_tiles(attention, step)), out)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_soft_caps_equal_float64(kv_dtype: str, window: int) -> None:
    check(attention_of(64, kv_dtype, softcap=0.7, window=window), rows_of((0, 70), (100, 20)))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_far_from_0_that_only_rise_or_fall_equal_float64(kv_dtype: str) -> None:
    prefill.check_steep(FAST, kv_dtype)


@pytest.mark.parametrize("act", [FP32, BF16, FP16])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_activations_of_any_dtype_equal_float64(kv_dtype: str, act: torch.dtype) -> None:
    attention = attention_of(64, kv_dtype)
    step = prepare(attention, rows_of((0, 9), (30, 40)), act)
    expected = step.expected(attention.scale, 0, 0.0)
    # Three roundings: the weights, queries to bf16 for products with a bf16 cache, and results to act.
    tolerance = 1e-2 if kv_dtype == "bf16" else {FP32: 1e-5, BF16: 5e-3, FP16: 1e-3}[act]
    assert relative_error(run(attention, step), expected) <= tolerance


@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(64, "bf16"), (128, "bf16"), (128, "q8_0"), (64, "fp32")])
def test_long_histories_and_long_chunks_equal_float64(head_dim: int, kv_dtype: str) -> None:
    attention = attention_of(head_dim, kv_dtype, group=4, page_size=32)
    check(attention, rows_of((2000, 30), (0, 300), (777, 129)))


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "launcher"),
    [(64, "bf16", FAST), (128, "q8_0", REVERSE), (96, "fp8", RANDOM), (256, "bf16", FAST)],
)
def test_contexts_of_several_segments_equal_float64_in_one_block_or_several(
    head_dim: int, kv_dtype: str, launcher: Launcher
) -> None:
    """The bits are the same in both, in other chunks, and whatever rows are beside."""
    prefill.check_segments(launcher, attention_of(head_dim, kv_dtype, group=3, page_size=32))


def test_segments_grow_with_the_position() -> None:
    """The host's and the kernel's positions of segments agree, also of those that are longer than the first."""
    attention = attention_of(64, group=1, page_size=64)
    step = prepare(attention, [Row(21_000, 2)])
    tiles = attention.tiles(step.arrays.query_starts.numpy(), step.arrays.context_lens.numpy())
    assert sorted(tiles[:, 2].tolist()) == [*range(0, 16384, 2048), 16384, 20480]
    assert tiles[0].tolist() == [0, 0, 16384, 8]
    out = check(attention, step.rows)
    assert torch.equal(run(attention, step, tiles=prefill.one_block_tiles(attention, step)), out)


@pytest.mark.parametrize("launcher", CHECKED[1:], ids=["reverse", "random"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_segments_have_no_races(is_cut: bool, launcher: Launcher) -> None:
    attention = attention_of(64, group=1, page_size=64)
    step = prepare(attention, [Row(2040, 10)])
    out = run(attention, step, launcher, tiles=None if is_cut else prefill.one_block_tiles(attention, step))
    assert prefill.error_of(attention, step, out) <= TOLERANCE["bf16"]


def test_layers_with_a_window_skip_other_layers_segments() -> None:
    everywhere, local = attention_of(64, window=0), attention_of(64, window=50)
    step = prepare(local, [Row(2100, 20)])
    tiles = everywhere.tiles(step.arrays.query_starts.numpy(), step.arrays.context_lens.numpy())
    assert len(tiles) == 2
    assert torch.equal(run(local, step, tiles=tiles), run(local, step))


def test_a_step_with_many_tiles_is_not_cut_into_segments() -> None:
    starts, contexts = np.array([0, 100, 8292], np.int32), np.array([30_000, 30_000], np.int32)
    few, many = attention_of(group=4, kv_heads=8), attention_of(group=4, kv_heads=8)
    tiles = few.tiles(starts[:2], contexts[:1])
    assert len(tiles) == 4 * 12
    assert sorted(tiles[:, 3].tolist()) == list(range(48))
    assert (many.tiles(starts, contexts)[:, 2] == -1).all()


def test_as_many_tiles_are_cut_as_the_workspace_has_slots_for() -> None:
    attention = attention_of(group=4, kv_heads=16)
    tiles = attention.tiles(np.array([0, 300], np.int32), np.array([100_000], np.int32))
    sizes = attention.workspace_sizes(300, 1 << 17)
    cut = tiles[tiles[:, 2] >= 0]
    assert sizes.max_parts == 64
    assert sorted(cut[:, 3].tolist()) == list(range(len(cut)))
    assert 0 < len(cut) <= 64
    assert len(tiles) - len(cut) + len(np.unique(cut[:, 1])) == 10


def test_the_prefill_workspace_has_the_announced_size_and_is_bounded() -> None:
    sizes = attention_of(128, kv_heads=8, group=4).workspace_sizes(2048, 1 << 17)
    workspace = sizes.make("meta")
    tensors = [getattr(workspace, field.name) for field in fields(workspace)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == sizes.num_bytes
    assert sizes.num_bytes < 105e6
    for attention in (attention_of(window=4000), attention_of(64, "fp32")):
        assert attention.workspace_sizes(2048, 1 << 17).num_bytes == 4, "a counter"
    assert attention_of().workspace_sizes(2048, 2048).num_bytes == 4


SEQUENCE_TOKENS = 150


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "group", "window"),
    [
        (64, "bf16", 3, 0), (64, "bf16", 3, 70), (80, "bf16", 3, 70), (256, "bf16", 3, 0), (64, "bf16", 1, 0),
        (96, "q8_0", 3, 0), (96, "q8_0", 3, 70), (64, "q8_0", 8, 0), (64, "fp8", 3, 0), (64, "fp8", 16, 70),
        (64, "fp32", 3, 0), (64, "fp32", 1, 70), (256, "fp32", 7, 70),
    ],
)  # fmt: skip
def test_a_sequence_has_the_same_bits_in_any_chunks(head_dim: int, kv_dtype: str, group: int, window: int) -> None:
    """The bits are also independent of rows' places in tiles, of pages, and of the order of threads."""
    attention = attention_of(head_dim, kv_dtype, group=group, window=window)
    whole = run(attention, prepare(attention, [Row(0, SEQUENCE_TOKENS)]))
    for size, launcher in ((7, FAST), (64, REVERSE)):
        chunks = [Row(at, min(size, SEQUENCE_TOKENS - at)) for at in range(0, SEQUENCE_TOKENS, size)]
        parts = [run(attention, prepare(attention, [chunk], seed=size), launcher) for chunk in chunks]
        assert torch.equal(torch.cat(parts), whole)
    # Every seventh position, at every place in a page: each takes a whole tile of the emulator.
    singles = [Row(at, 1) for at in range(0, SEQUENCE_TOKENS, 7)]
    assert torch.equal(run(attention, prepare(attention, singles), RANDOM), whole[::7])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kv_dtype: str) -> None:
    attention = attention_of(64, kv_dtype, group=3, kv_heads=2)
    row = Row(50, 60, seed=9)
    alone = run(attention, prepare(attention, [row]))
    batch = [Row(0, 1, 1), Row(99, 1, 2), Row(0, 21, 3), row, Row(3, 140, 4)]
    together = run(attention, prepare(attention, batch, seed=7))
    assert torch.equal(together[23:83], alone)


def test_rows_before_the_first_are_not_changed() -> None:
    attention = attention_of()
    step = prepare(attention, rows_of((3, 1), (30, 1), (0, 20), (9, 5)))
    out, all_out = run(attention, step, first_row=2), run(attention, step)
    assert out[:2].isnan().all()
    assert torch.equal(out[2:], all_out[2:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_without_a_slot_are_skipped(kv_dtype: str) -> None:
    """Tiles have one token each, as in captured steps. In the checking mode a stray access is an error."""
    attention = attention_of(64, kv_dtype, group=3)
    step = prepare(attention, rows_of((5, 1), (70, 1), (0, 1), (33, 1)))
    expected = run(attention, step)
    for row in (0, 2):
        step.arrays.slots[row] = -1
        step.arrays.context_lens[row] = 0
    out = run(attention, step, CHECKED[0])
    assert out[[0, 2]].isnan().all()
    assert torch.equal(out[[1, 3]], expected[[1, 3]])


@pytest.mark.parametrize("launcher", CHECKED)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_prefill_has_no_races_and_stays_in_bounds(kv_dtype: str, launcher: Launcher) -> None:
    """The checking mode requires accesses within tensors, ordered by barriers, and to written memory."""
    check(attention_of(64, kv_dtype, group=3), rows_of((70, 1), (0, 20), (60, 9)), launcher)


@pytest.mark.parametrize(("number", "head_dim", "kv_dtype"), [(i, *each) for i, each in enumerate(SHAPES[::2])])
def test_every_head_size_has_no_races_with_a_window(number: int, head_dim: int, kv_dtype: str) -> None:
    """Each with some caches, and each cache with some head sizes, in one order; the test above runs one head size in
    all orders."""
    launcher = CHECKED[number % len(CHECKED)]
    check(attention_of(head_dim, kv_dtype, group=1, window=20, softcap=5.0), rows_of((64, 20)), launcher)


def test_tiles_cover_each_query_once_longest_first() -> None:
    attention = attention_of(group=3)
    starts, contexts = np.array([0, 1, 2, 102, 302], np.int32), np.array([5, 9, 1000, 0], np.int32)
    tiles = attention.tiles(starts, contexts, first_row=1)
    assert tiles.dtype == np.int32
    assert sorted(map(tuple, tiles[:, :2].tolist())) == [
        (1, 0), *((2, first) for first in range(0, 300, 128)), *((3, first) for first in range(0, 600, 128))
    ]  # fmt: skip
    assert tiles[:4, :2].tolist() == [[2, 256], [2, 128], [2, 0], [3, 512]]
    assert (tiles[:, 2] == -1).all()
    assert attention.tiles(starts, contexts, first_row=4).shape == (0, 4)


def test_a_step_without_tiles_launches_nothing() -> None:
    attention = attention_of()
    assert run(attention, prepare(attention, rows_of((3, 1))), first_row=1).isnan().all()


def test_unsupported_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim is 72"):
        attention_of(72)
    with pytest.raises(ValueError, match="q8_0 cache needs a multiple of 32"):
        attention_of(80, "q8_0")
    with pytest.raises(ValueError, match="34 heads share 2 KV heads"):
        attention_of(kv_heads=2, group=17)
    with pytest.raises(ValueError, match="page_size_tokens is 8"):
        attention_of(page_size=8)
    with pytest.raises(ValueError, match="window_tokens is -1"):
        attention_of(window=-1)
    with pytest.raises(ValueError, match="65536 tiles"):
        attention_of(group=1).tiles(np.array([0, 128 << 16], np.int32), np.array([0], np.int32))
    with pytest.raises(ValueError, match="scale is 0"):
        PrefillAttention(attention_of().layout, 2, 0.0)
