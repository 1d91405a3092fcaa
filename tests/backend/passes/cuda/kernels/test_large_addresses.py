"""The kernels address arrays of more than 2^32 elements, in memory that is reserved but mostly not touched."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.cuda.attention.prefill_attention import PrefillAttention
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import copy_pages
from penstock.backend.passes.cuda.ops.expert_ops import expert_kernels
from penstock.backend.passes.cuda.step.device_sampler import LogprobBuffers
from penstock.backend.passes.cuda.step.step_buffers import kernels
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.cases.elementwise import ints, make
from penstock.tools.gpu.cases.sampler import SamplingDevice, slot_init
from tests.cuda_emulator import EmulatedLauncher

LAUNCHER = EmulatedLauncher()
HEADS = HeadShape(4, 2, 64)
PAGE_TOKENS = 16
LAYER_BYTES = 125 << 30
"""A whole GPU's cache in one layer."""
MAX_PAGES = 1 << 20
"""Pages of one sequence: 16 Mi tokens."""
_MAP_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, see asm-generic/mman.h."""


def reserved(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags), dtype=dtype)


def attend(kv_dtype: str, num_pages: int, pages: list[int], slot: int) -> list[Tensor]:
    """Compute a sequence of 40 tokens in these pages. Return its rotated queries, all tokens' outputs as one chunk, and
    the last token's output as a row of one token."""
    layout = CacheLayout(1, num_pages, PAGE_TOKENS, HEADS.num_kv_heads, HEADS.head_dim, kv_dtype)
    cache = reserved(layout.layer_bytes, torch.uint8)
    page_table = reserved((slot + 1) * MAX_PAGES, torch.int32).view(-1, MAX_PAGES)
    page_table[slot, : len(pages)] = ints(*pages)
    qkv = torch.randn(40, HEADS.qkv_size, generator=torch.Generator().manual_seed(1))
    chunk = RowArrays(ints(0, 40), ints(0), ints(slot))
    rope = torch.randn(40, HEADS.head_dim, generator=torch.Generator().manual_seed(2))
    elementwise = make(LAUNCHER, heads=HEADS, kv_dtype=kv_dtype, page_size=PAGE_TOKENS)
    elementwise.rope_and_store(qkv, cache, page_table, chunk, rope, None)

    sinks, outputs = torch.zeros(HEADS.num_heads), torch.zeros(40, HEADS.output_size)
    prefill = PrefillAttention(layout, HEADS.num_heads, 0.125)
    tiles = torch.from_numpy(prefill.tiles(np.array([0, 40], np.int32), np.zeros(1, np.int32)))
    results = prefill.workspace_sizes(40, 40).make("cpu")
    prefill.attend(LAUNCHER, results, qkv, cache, page_table, chunk, tiles, sinks, outputs)

    last = torch.zeros(1, HEADS.output_size)
    decode = DecodeAttention(
        layout, HEADS.num_heads, 0.125, max_rows=1, max_context_tokens=64, num_sms=1, shared_bytes_per_sm=228 << 10
    )
    workspace = decode.make_workspace("cpu")
    decode.plan(LAUNCHER, workspace, ints(39), ints(slot), 1)
    decode.attend(LAUNCHER, workspace, qkv[39:], cache, page_table, sinks, last)
    return [qkv, outputs, last]


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_sequence_has_the_same_bits_at_the_end_of_a_large_cache_and_in_a_small_one(kv_dtype: str) -> None:
    page_bytes = CacheLayout(1, 1, PAGE_TOKENS, HEADS.num_kv_heads, HEADS.head_dim, kv_dtype).page_bytes
    num_pages = LAYER_BYTES // page_bytes
    # The slot's page table entries are beyond 2^31 too.
    large = attend(kv_dtype, num_pages, [num_pages - 1, num_pages // 2, num_pages - 3], slot=2049)
    small = attend(kv_dtype, 3, [0, 1, 2], slot=0)
    assert all(x.isfinite().all() and x.any() for x in small)
    assert all(map(torch.equal, large, small))


def test_pages_of_far_layers_are_copied() -> None:
    layout = CacheLayout(3, LAYER_BYTES // 3 // 8192, PAGE_TOKENS, 2, 64, "bf16")
    cache = reserved(layout.num_bytes, torch.uint8).view(layout.num_layers, -1, layout.page_bytes)
    source, target = 1, layout.num_pages - 1
    cache[:, source] = torch.arange(1, 4, dtype=torch.uint8)[:, None]
    for pair in ((source, target), (target, 2)):
        copy_pages(LAUNCHER, cache, cache, ints(*pair).view(1, 2))
        assert cache[:, pair[1]].unique(dim=1).tolist() == [[1], [2], [3]]
    assert not cache[:, target - 1].any()


def test_a_page_changes_in_the_row_of_a_far_slot() -> None:
    (change_pages,) = kernels()
    page_table = reserved(4096 * MAX_PAGES, torch.int32)
    LAUNCHER.launch(change_pages, (1, 1, 1), ints(4095, 7, 5), page_table, np.int32(1), np.int32(MAX_PAGES))
    assert page_table[4095 * MAX_PAGES + 7] == 5


def test_the_last_token_of_a_large_table_is_embedded_and_a_far_row_is_gathered() -> None:
    hidden, vocab_size = 16384, 1 << 18
    table = reserved(hidden * vocab_size, torch.bfloat16).view(vocab_size, hidden)
    table[-1] = torch.arange(hidden) % 251
    rows, residual = RowArrays(ints(0, 1), ints(0), ints(0)), torch.zeros(1, hidden)
    elementwise = make(LAUNCHER, torch.bfloat16, hidden=hidden)
    elementwise.embed(table, ints(vocab_size - 1), rows, ints(0), residual)
    assert torch.equal(residual[0], table[-1].float())
    gathered = torch.zeros(1, hidden, dtype=torch.bfloat16)
    elementwise.gather_rows(table, ints(vocab_size - 1), gathered)
    assert torch.equal(gathered[0], table[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_far_expert_are_multiplied_by_its_weight(dtype: torch.dtype) -> None:
    num_experts, outputs, inputs = 130, 1 << 22, 8
    weight = reserved(num_experts * outputs * inputs, dtype).view(num_experts, outputs, inputs)
    weight[-1, :32] = torch.arange(32)[:, None]
    x, out = torch.full((1, inputs), 0.5, dtype=dtype), torch.zeros(1, outputs, dtype=dtype)
    ends = ints(*[0] * (num_experts - 1), 1)
    multiply = expert_kernels(ACT_MACRO[dtype])[2]
    sizes = map(np.int32, (num_experts, outputs, inputs, 0))
    LAUNCHER.launch(multiply, (1, 1, 1), x, ints(0), weight, ends, out, *sizes)
    assert out[0, :32].tolist() == [4.0 * i for i in range(32)]


def test_rows_of_logits_that_lie_far_apart_are_sampled() -> None:
    vocab_size, num_rows, stride = 5000, 3, 3 << 30
    logits = reserved(stride * num_rows, torch.bfloat16).as_strided((num_rows, vocab_size), (stride, 1))
    expected = [4321, 17, 4999]
    logits[range(num_rows), expected] = 5.0
    device = SamplingDevice(LAUNCHER, vocab_size, num_rows, torch.bfloat16)
    device.take(
        slot_init(0, temperature=0.0, num_logprobs=1), slot_init(1, temperature=0.01), slot_init(2, top_k=1, top_p=0.5)
    )
    assert device.sample(logits, [0, 1, 2]) == expected
    out = LogprobBuffers(torch.zeros(3), ints(0, 0, 0), torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 1))
    device.sampler.logprobs(logits, ints(*expected), ints(0, 1, 2), out, ints(), out.top_ids.shape[1])
    assert out.top_ids.flatten().tolist() == expected
    assert out.ranks.tolist() == [1, 1, 1]
