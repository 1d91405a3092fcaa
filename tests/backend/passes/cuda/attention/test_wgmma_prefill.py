"""Prefill attention with products of warpgroups equals attention in float64, like that with mma.sync."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from penstock.backend.passes.cuda.attention.prefill_attention import PrefillAttention
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from penstock.tools.gpu.cases.attention import prefill
from penstock.tools.gpu.cases.attention.paged_rows import STEEP_TOLERANCE, Row
from penstock.tools.gpu.cases.attention.prefill import TOLERANCE, attention_of, prepare, rows_of, run
from penstock.tools.gpu.cases.ptx_wrappers import HOPPER_SOURCE, HOPPER_WRAPPERS, hopper_kernel
from tests.backend.passes.cuda.kernels import sass
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
REVERSE, RANDOM = EmulatedLauncher(order="reverse"), EmulatedLauncher(order="random", seed=3)
CHECKED = (EmulatedLauncher("check"), EmulatedLauncher("check", "reverse"), EmulatedLauncher("check", "random", seed=5))


def attention(head_dim: int = 64, *, group: int = 2, page_size: int = 16, window: int = 0) -> PrefillAttention:
    return attention_of(head_dim, group=group, page_size=page_size, window=window, has_wgmma=True)


def check(
    attention: PrefillAttention, rows: list[Row], launcher: Launcher = FAST, act: torch.dtype | None = None
) -> torch.Tensor:
    step = prepare(attention, rows, act)
    out = run(attention, step, launcher)
    assert prefill.error_of(attention, step, out) <= TOLERANCE["bf16" if act else attention.layout.kv_dtype]
    return out


@pytest.mark.parametrize("launcher", [FAST, REVERSE, RANDOM], ids=["forward", "reverse", "random"])
@pytest.mark.parametrize("wrapper", HOPPER_WRAPPERS)
def test_a_wrapper_agrees_with_torch_and_the_manual(wrapper: str, launcher: Launcher) -> None:
    HOPPER_WRAPPERS[wrapper](launcher)


def test_the_assembler_accepts_every_wrapper() -> None:
    sizes = ("shared_64", "shared_128", "64", "80", "96", "128")
    entries = (*(f"multiply_{size}" for size in sizes), "copy", "take_turns")
    assert HOPPER_SOURCE.read_text().count("__global__") == len(entries)
    for report in nvrtc.compile_kernels([hopper_kernel(entry, 0) for entry in entries], "sm_90a"):
        assert report.spill_bytes == 0


@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_machine_code_takes_the_softmax_between_turns_and_the_wait_for_the_sums(kv_dtype: str) -> None:
    """ptxas says if it makes products wait for each other, or ignores setmaxnreg."""
    kernel = attention_of(128, kv_dtype, has_wgmma=True).kernel
    report = nvrtc.compile_kernel(kernel, "sm_90a")
    assert report.spill_bytes == 0
    assert "serialized" not in report.log
    assert "setmaxnreg" not in report.log
    tile = sass.disassemble(report.cubin)[kernel.entry].loop_of("HGMMA", share=0.5)
    assert tile is not None
    waits = {"WARPGROUP.DEPBAR.LE gsb0, 0x1": "scores", "WARPGROUP.DEPBAR.LE gsb0, 0x0": "sums"}
    steps = {"BAR.SYNC.DEFER_BLOCKING": "take", "BAR.ARV": "pass", "MUFU.EX2": "exp"}
    order = [
        waits.get(f"{each.opcode} {each.operands}") or steps.get(each.opcode) or each.name
        for each in tile.path
        if each.name in ("BAR", "HGMMA", "MUFU", "F2FP") or each.opcode.startswith("WARPGROUP.DEPBAR")
    ]
    order = [name for name, _ in groupby(name for name in order if name != "MUFU")]
    assert order == ["take", "HGMMA", "pass", "scores", "exp", "sums", "F2FP"]


def test_caches_of_16_and_8_bits_use_warpgroups() -> None:
    for head_dim, dtypes in ((128, ["bf16", "q8_0", "fp8"]), (256, ["bf16"])):
        needs = {dtype: attention_of(head_dim, dtype, has_wgmma=True).kernel.needs_wgmma for dtype in KV_MACRO}
        assert [dtype for dtype, is_needed in needs.items() if is_needed] == dtypes
    assert not attention_of(128, has_wgmma=False).kernel.needs_wgmma


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (64, 64), (80, 32), (96, 16), (128, 32), (256, 64)])
def test_lengths_and_histories_around_page_and_tile_edges_equal_float64(head_dim: int, page_size: int) -> None:
    edges = sorted({1, page_size - 1, page_size + 1, 127, 128, 129})
    shapes = [(0, edge) for edge in edges] + [(edge, 3) for edge in edges] + [(130, 260)]
    check(attention(head_dim, group=1, page_size=page_size), rows_of(*shapes))


@pytest.mark.parametrize("group", [3, 4, 7, 16])
def test_groups_of_any_size_equal_float64(group: int) -> None:
    check(attention(group=group), rows_of((0, 1), (30, 2), (117, 40)))


@pytest.mark.parametrize(("kv_dtype", "head_dim"), [("q8_0", 64), ("q8_0", 128), ("fp8", 80)])
def test_quantised_caches_equal_float64(kv_dtype: str, head_dim: int) -> None:
    """Queries in fp16, and in bf16 and fp32, which are converted; none of the rest of the pages is read."""
    quantised = attention_of(head_dim, kv_dtype, kv_heads=2, group=3, page_size=32, has_wgmma=True)
    for act in (None, torch.bfloat16, torch.float32):
        check(quantised, rows_of((0, 1), (130, 60), (0, 140)), act=act)
    prefill.check_segments(REVERSE, attention_of(head_dim, kv_dtype, group=3, window=0, has_wgmma=True), ((4095, 3),))


@pytest.mark.parametrize("window", [1, 65, 128, 200])
def test_windows_read_no_token_before_them(window: int) -> None:
    check(attention(window=window), rows_of((0, 150), (308, 70), (129, 1), (5, 3)))


@pytest.mark.parametrize("window", [0, 50])
def test_soft_caps_and_steep_logits_equal_float64(window: int) -> None:
    capped = attention_of(64, softcap=0.7, window=window, has_wgmma=True)
    check(capped, rows_of((0, 70), (100, 20)))
    steep = attention(window=window)
    step = prepare(steep, [Row(0, 1, 1, is_steep=True), Row(40, 290, 2, is_steep=True)])
    assert prefill.error_of(steep, step, run(steep, step, FAST)) <= STEEP_TOLERANCE["bf16"]


@pytest.mark.parametrize(("head_dim", "launcher"), [(64, REVERSE), (128, RANDOM), (256, FAST)])
def test_contexts_of_several_segments_have_the_same_bits_in_one_block_or_several(
    head_dim: int, launcher: Launcher
) -> None:
    prefill.check_segments(launcher, attention(head_dim, group=3, page_size=32))


@pytest.mark.parametrize(("group", "window"), [(3, 0), (1, 70)])
def test_a_sequence_has_the_same_bits_in_any_chunks(group: int, window: int) -> None:
    """The bits are also independent of rows' places in tiles, of pages, and of the order of threads."""
    chunked = attention(group=group, window=window)
    at_once = run(chunked, prepare(chunked, [Row(0, 150)]), FAST)
    for size, launcher in ((37, REVERSE), (64, RANDOM)):
        chunks = [Row(at, min(size, 150 - at)) for at in range(0, 150, size)]
        parts = [run(chunked, prepare(chunked, [chunk], seed=size), launcher) for chunk in chunks]
        assert torch.equal(torch.cat(parts), at_once)
    singles = [Row(at, 1) for at in range(100, 150)]
    assert torch.equal(run(chunked, prepare(chunked, singles), FAST), at_once[100:])


def test_bits_do_not_depend_on_the_number_of_blocks() -> None:
    rows = rows_of((0, 150), (2100, 40), (70, 1), (0, 300))
    outs = [
        run(several, prepare(several, rows), FAST)
        for several in (attention_of(64, kv_heads=2, has_wgmma=True, num_sms=num_sms) for num_sms in (1, 3, 132))
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_rows_without_a_slot_are_skipped() -> None:
    padded = attention(group=3)
    step = prepare(padded, rows_of((5, 1), (70, 1), (0, 1), (33, 1)))
    expected = run(padded, step, FAST)
    for row in (0, 2):
        step.arrays.slots[row] = -1
        step.arrays.context_lens[row] = 0
    out = run(padded, step, CHECKED[0])
    assert out[[0, 2]].isnan().all()
    assert torch.equal(out[[1, 3]], expected[[1, 3]])


@pytest.mark.parametrize("launcher", CHECKED, ids=["forward", "reverse", "random"])
def test_warpgroups_have_no_races_and_stay_in_bounds(launcher: Launcher) -> None:
    """More tiles than the ring has slots for; windows that begin within a tile; segments in a block each and in one."""
    check(attention(128, group=1), rows_of((300, 30)), launcher)
    check(attention(64, group=3, window=20), rows_of((150, 9), (0, 20)), launcher)
    check(attention(96, group=16), rows_of((3, 20), (0, 9), (130, 2)), launcher)
    check(attention(256, group=3), rows_of((70, 50), (0, 1)), launcher)
    check(attention_of(128, "q8_0", group=1, has_wgmma=True), rows_of((300, 30)), launcher)
    check(attention_of(96, "fp8", window=20, has_wgmma=True), rows_of((150, 9), (0, 20)), launcher)
    segments = attention(64, group=1, page_size=64)
    step = prepare(segments, [Row(2040, 10)])
    assert torch.equal(
        run(segments, step, launcher), run(segments, step, launcher, tiles=prefill.one_block_tiles(segments, step))
    )
