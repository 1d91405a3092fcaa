"""Decode attention on the emulator equals attention in float64 over the same quantised cache."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.decode_attention import (
    SM_SHARED_BYTES,
    DecodeWorkspace,
    kernels,
)
from penstock.backend.passes.cuda.attention.kernel_limits import HEAD_DIMS
from penstock.backend.passes.cuda.device.kernel_choices import KernelChoices
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from penstock.backend.passes.ops.interface import supports_q8_0
from penstock.tools.gpu.cases.attention.decode import (
    H200_SHARED_BYTES,
    TOLERANCE,
    DecodeCase,
    attention_of,
    check_long_chunk,
    check_plan,
    check_steep,
    planned_items,
    poisoned_workspace,
    row_of,
    rows_of,
)
from tests.cuda_emulator import EmulatedLauncher

SMALL_SHARED_BYTES = 100 * 1024  # sm_86, sm_89, sm_120
FAST = EmulatedLauncher()
ORDERS = (FAST, EmulatedLauncher(order="reverse"), EmulatedLauncher(order="random", seed=3))
CHECKED = tuple(EmulatedLauncher("check", order, seed=5) for order in ("forward", "reverse", "random"))


@dataclass(frozen=True)
class Batch(DecodeCase):
    def run(self, launcher: Launcher = FAST, workspace: DecodeWorkspace | None = None) -> Tensor:
        return super().run(launcher, workspace)

    def check(self, launcher: Launcher = FAST, tolerance: float | None = None) -> Tensor:
        """Run, and compare with float64."""
        out = self.run(launcher)
        assert self.error(out) <= (tolerance or TOLERANCE[out.dtype])
        return out


ALL_CACHES = [(d, kv_dtype) for kv_dtype in KV_MACRO for d in HEAD_DIMS if kv_dtype != "q8_0" or supports_q8_0(d)]


@pytest.mark.parametrize(("head_dim", "kv_dtype"), ALL_CACHES)
def test_every_head_size_and_cache_equals_float64(head_dim: int, kv_dtype: str) -> None:
    attention = attention_of(head_dim, kv_dtype, page_size=32)
    Batch.of(attention, rows_of(1, 31, 77, 300)).check()


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_lengths_around_page_and_chunk_edges_equal_float64(kv_dtype: str, page_size: int) -> None:
    lengths = [1, page_size - 1, page_size, page_size + 1, 255, 256, 257, 511, 512, 513]
    attention = attention_of(64, kv_dtype, page_size=page_size, kv_heads=1)
    Batch.of(attention, rows_of(*lengths)).check()


@pytest.mark.parametrize(("group", "kv_dtype"), [(group, tuple(KV_MACRO)[group % 4]) for group in range(1, 17)])
def test_groups_of_any_size_equal_float64(kv_dtype: str, group: int) -> None:
    attention = attention_of(64, kv_dtype, group=group)
    Batch.of(attention, rows_of(1, 40, 290)).check()


@pytest.mark.parametrize("act", list(TOLERANCE))
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_queries_and_outputs_of_every_dtype_equal_float64(kv_dtype: str, act: torch.dtype) -> None:
    tolerance = max(TOLERANCE[act], 1e-5 if kv_dtype == "fp32" else 1e-2 if kv_dtype == "bf16" else 2e-3)
    Batch.of(attention_of(64, kv_dtype), rows_of(3, 270), act).check(tolerance=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [1, 17, 100, 300, 1000])
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_window_reads_no_page_before_it(kv_dtype: str, window: int, softcap: float) -> None:
    attention = attention_of(64, kv_dtype, kv_heads=1, window=window, softcap=softcap)
    lengths = [1, window, window + 1, window + 15, 700]
    Batch.of(attention, rows_of(*lengths)).check()


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_long_ragged_batches_have_the_same_bits_in_any_order_of_threads(kv_dtype: str) -> None:
    attention = attention_of(128, kv_dtype, page_size=32, num_sms=8)
    batch = Batch.of(attention, rows_of(4096, 1, 700, 33, 1500))
    first, *others = (batch.check(launcher) for launcher in ORDERS)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("head_dim", [80, 256])
def test_more_chunks_than_a_warp_has_lanes_equal_float64(head_dim: int) -> None:
    """Chunks are merged 32 at a time."""
    attention = attention_of(head_dim, kv_heads=1, group=2, page_size=64, max_context=1 << 17)
    Batch.of(attention, rows_of(256 * 33 + 1)).check()


@pytest.mark.parametrize("length", [4096, 4097])
def test_chunks_grow_to_limit_their_number_per_row(length: int) -> None:
    attention = attention_of(64, kv_heads=16, group=1, page_size=64, max_context=1 << 17)
    assert attention.max_chunks == 16
    batch = Batch.of(attention, rows_of(length))
    batch.check()
    *_, last = planned_items(FAST, attention, batch.step.arrays.context_lens, batch.step.arrays.slots)
    assert last[3] + 1 == -(-length // (256 if length == 4096 else 512))


@pytest.mark.parametrize("launcher", [FAST, CHECKED[0]], ids=["fast", "check"])
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_chunk_may_have_more_pages_than_a_warp_holds_at_once(kv_dtype: str, launcher: Launcher) -> None:
    check_long_chunk(launcher, kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_logits_far_from_0_that_only_rise_or_fall_equal_float64(kv_dtype: str) -> None:
    check_steep(FAST, kv_dtype)


@pytest.mark.parametrize("launcher", CHECKED, ids=["forward", "reverse", "random"])
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_decode_has_no_races_and_stays_in_bounds(kv_dtype: str, launcher: Launcher) -> None:
    attention = attention_of(64, kv_dtype, group=3, num_sms=2)
    Batch.of(attention, [None, *rows_of(1, 40, 300, 530)]).check(launcher)


@pytest.mark.parametrize(("number", "head_dim", "kv_dtype"), [(i, *each) for i, each in enumerate(ALL_CACHES[::2])])
def test_every_head_size_has_no_races_with_the_least_shared_memory(number: int, head_dim: int, kv_dtype: str) -> None:
    """Each with some caches, and each cache with some head sizes, in one order; the test above runs one head size in
    all orders."""
    launcher = CHECKED[number % len(CHECKED)]
    attention = attention_of(head_dim, kv_dtype, page_size=32, shared_bytes=SMALL_SHARED_BYTES, window=290, num_sms=2)
    Batch.of(attention, rows_of(30, 600)).check(launcher)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_row_does_not_depend_on_its_batch_slot_pages_or_device(kv_dtype: str) -> None:
    row, others = row_of(1100, 7), rows_of(5, 300, 2000)
    alone = Batch.of(attention_of(64, kv_dtype), [row]).run()[0]
    for seed, place, shared_bytes in ((1, 0, H200_SHARED_BYTES), (2, 2, SMALL_SHARED_BYTES), (3, 3, H200_SHARED_BYTES)):
        attention = attention_of(64, kv_dtype, num_sms=1 + seed, shared_bytes=shared_bytes)
        rows = [*others[:place], row, *others[place:]]
        assert torch.equal(Batch.of(attention, rows, seed=seed).run()[place], alone)
    other_pages = Batch.of(attention_of(64, kv_dtype, page_size=64, max_context=2000), [row]).run()[0]
    assert torch.equal(other_pages, alone)


def test_a_workspace_can_be_reused_by_later_steps() -> None:
    attention = attention_of()
    workspace = poisoned_workspace(attention)
    for seed, lengths in enumerate([(600, 20, 1000), (3,), (257, 600)]):
        batch = Batch.of(attention, rows_of(*lengths), seed=seed)
        assert torch.equal(batch.run(FAST, workspace), batch.run())


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_nan_does_not_leave_its_row_and_head(kv_dtype: str) -> None:
    attention = attention_of(64, kv_dtype)
    batch = Batch.of(attention, rows_of(300, 300, 20))
    step = batch.step
    blocks = step.layer_cache.view(-1, 2, attention.layout.num_kv_heads, attention.layout.block_bytes)
    blocks[step.page_table[step.arrays.slots[1], 3], 0, 0] = 0xFF
    out = batch.run()
    assert out[1, :4].isnan().all()
    assert not out[1, 4:].isnan().any()
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("length", [300, 304])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8"])
def test_page_table_entries_beyond_the_row_are_not_read(kv_dtype: str, length: int) -> None:
    batch = Batch.of(attention_of(64, kv_dtype, kv_heads=1), rows_of(length))
    step = batch.step
    table = step.page_table[
        step.arrays.slots, : -(-length // 16)
    ].contiguous()  # so that the checking mode knows its end
    step.arrays.slots.fill_(0)
    Batch(batch.attention, replace(step, page_table=table)).check(CHECKED[0])


def test_a_batch_without_slots_computes_nothing() -> None:
    batch = Batch.of(attention_of(), rows_of(20, 30))
    batch.step.arrays.slots.fill_(-1)
    assert batch.run().isnan().all()


@pytest.mark.parametrize("launcher", [FAST, CHECKED[0]], ids=["fast", "check"])
def test_the_plan_lists_every_chunk_once_longest_first(launcher: Launcher) -> None:
    check_plan(launcher)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
@pytest.mark.parametrize(
    ("lengths", "shortest"), [((300, 1), 128), ((300, 900, 700), 256), ((2000, 2048, 1), 512), ((2000,) * 9, 2048)]
)
def test_chunks_grow_with_the_tokens_of_the_step(kv_dtype: str, lengths: tuple[int, ...], shortest: int) -> None:
    """Eight chunks fill this device."""
    choices = KernelChoices(chunk_levels=1)
    attention = attention_of(64, kv_dtype, kv_heads=1, group=1, num_sms=1, max_context=2048, choices=choices)
    workspace = poisoned_workspace(attention)
    batch = Batch.of(attention, rows_of(*lengths))
    out = batch.run(CHECKED[0] if len(lengths) == 3 else FAST, workspace)
    assert batch.error(out) <= TOLERANCE[out.dtype]
    assert workspace.plan.tolist() == [sum(-(-length // shortest) for length in lengths), shortest]


def test_the_workspace_has_the_announced_size_and_is_bounded() -> None:
    attention = attention_of(128, kv_heads=8, max_rows=256, max_context=1 << 17)
    workspace = attention.make_workspace("meta")
    tensors = [getattr(workspace, field.name) for field in fields(workspace)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == attention.workspace_bytes
    assert attention.workspace_bytes < 140e6
    assert attention_of(128, kv_heads=8, max_rows=256, max_context=1 << 24).workspace_bytes < 140e6


@pytest.mark.parametrize("shared_bytes", [SMALL_SHARED_BYTES, 164 * 1024, H200_SHARED_BYTES])
@pytest.mark.parametrize(("head_dim", "kv_dtype"), ALL_CACHES)
def test_blocks_fit_into_shared_memory(head_dim: int, kv_dtype: str, shared_bytes: int) -> None:
    attention = attention_of(head_dim, kv_dtype, shared_bytes=shared_bytes)
    assert 30_000 <= attention.kernel.shared_bytes <= shared_bytes - 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 72}, "head_dim is 72; it must be one of 64, 80, 96, 128, 256"),
        ({"head_dim": 80, "kv_dtype": "q8_0"}, "head_dim is 80; a q8_0 cache needs a multiple of 32"),
        ({"kv_dtype": "int4"}, "kv_dtype is int4"),
        ({"page_size": 8}, "page_size_tokens is 8; it must be one of 16, 32, 64"),
        ({"group": 17}, "34 heads share 2 KV heads; each KV head must have the same number of heads, 1 to 16"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_rows": 65536}, "max_rows is 65536"),
        ({"max_context": 1 << 25}, "max_context_tokens is 33554432"),
        ({"window": -1}, "window_tokens is -1"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"shared_bytes": 48 * 1024, "head_dim": 256}, "49152 bytes of shared memory per SM are too few"),
    ],
)
def test_unsupported_shapes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_of(**arguments)


def test_more_rows_than_the_workspace_has_are_refused() -> None:
    batch = Batch.of(attention_of(max_rows=1), rows_of(3, 4))
    with pytest.raises(ValueError, match="2 rows; at most 1 are allowed"):
        batch.run()


def test_the_manifest_lists_what_every_device_uses_once() -> None:
    listed = [kernel for kernel in kernels() if kernel.entry == "decode_attention"]
    used = {
        attention_of(head_dim, kv_dtype, shared_bytes=shared_bytes).kernel
        for head_dim, kv_dtype in ALL_CACHES
        for shared_bytes in SM_SHARED_BYTES
    }
    assert len(listed) == len(used)
    assert set(listed) == used
