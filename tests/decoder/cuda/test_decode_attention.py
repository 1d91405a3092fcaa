"""Decode attention on the emulator, against attention in float64 over the same quantised cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.passes.decoder.cuda.attention_limits import HEAD_DIMS
from backend.passes.decoder.cuda.cache_layout import KV_MACRO, CacheLayout
from backend.passes.decoder.cuda.decode_attention import DecodeAttention, DecodeWorkspace, kernels
from backend.passes.decoder.cuda.launcher import Launcher
from backend.passes.decoder.kv_torch import quantise
from tests.cuda_emulator import EmulatedLauncher

H200_SHARED_BYTES = 228 * 1024
SMALL_SHARED_BYTES = 100 * 1024  # sm_86, sm_89, sm_120
FAST = EmulatedLauncher()
ORDERS = (FAST, EmulatedLauncher(order="reverse"), EmulatedLauncher(order="random", seed=3))
CHECKED = tuple(EmulatedLauncher("check", order, seed=5) for order in ("forward", "reverse", "random"))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ACT_OF = {kv_dtype: torch.float32 if kv_dtype == "fp32" else torch.bfloat16 for kv_dtype in KV_MACRO}
NOT_A_PAGE = 1 << 30


@dataclass(frozen=True)
class Row:
    """A sequence at its last token; numbers are decided by the seed alone."""

    length: int
    seed: int

    def draw(self, attention: DecodeAttention, act: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q [H, D], k and v [length, KVH, D]"""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.length)
        kv_heads, head_dim = attention.layout.num_kv_heads, attention.layout.head_dim
        q = torch.randn(attention.num_heads, head_dim, generator=generator).to(act)
        k, v = torch.randn(2, self.length, kv_heads, head_dim, generator=generator) * 2
        return q, k, v


def rows_of(*lengths: int) -> list[Row]:
    return [Row(length, seed) for seed, length in enumerate(lengths)]


def attention_of(
    head_dim: int = 64,
    kv_dtype: str = "bf16",
    *,
    kv_heads: int = 2,
    group: int = 4,
    page_size: int = 16,
    num_pages: int = 0,
    num_sms: int = 3,
    shared_bytes: int = H200_SHARED_BYTES,
    max_rows: int = 16,
    max_context: int = 8192,
    window: int = 0,
    softcap: float = 0.0,
) -> DecodeAttention:
    return DecodeAttention(
        CacheLayout(1, num_pages, page_size, kv_heads, head_dim, kv_dtype),
        kv_heads * group,
        head_dim**-0.5,
        max_rows=max_rows,
        max_context_tokens=max_context,
        num_sms=num_sms,
        shared_bytes_per_sm=shared_bytes,
        window_tokens=window,
        softcap=softcap,
    )


def encode(x: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of x [..., head_dim]: its bytes, its scales' bytes, and the numbers that these mean, in float64."""
    if kv_dtype == "q8_0":
        numbers, scales = quantise(x)
        value = (numbers.double() * scales.double()).flatten(-2)
        return numbers.flatten(-2).view(torch.uint8), scales.squeeze(-1).contiguous().view(torch.uint8), value
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kv_dtype]
    y = x.to(dtype)
    return y.view(torch.uint8), torch.empty(*x.shape[:-1], 0, dtype=torch.uint8), y.double()


@dataclass
class Batch:
    """Rows in a cache in which all else is NaN: pages of nobody, and places that are not written yet."""

    attention: DecodeAttention
    qkv: Tensor
    cache: Tensor
    page_table: Tensor
    context_lens: Tensor
    slots: Tensor
    expected: Tensor

    @classmethod
    def of(
        cls,
        attention: DecodeAttention,
        rows: Sequence[Row | None],
        act: torch.dtype = torch.bfloat16,
        seed: int = 0,
        first_token_kept: dict[int, int] | None = None,
    ) -> Batch:
        """None is a row without a slot. first_token_kept: of a row, the first token whose page it still owns."""
        layout = attention.layout
        generator = torch.Generator().manual_seed(seed)
        max_pages = max(-(-row.length // layout.page_size_tokens) for row in rows if row) + 2
        num_pages = sum(-(-row.length // layout.page_size_tokens) for row in rows if row) + 3
        free_pages = torch.randperm(num_pages, generator=generator).tolist()
        free_slots = torch.randperm(len(rows) + 3, generator=generator).tolist()
        heads, kv_heads, head_dim = attention.num_heads, layout.num_kv_heads, layout.head_dim
        batch = cls(
            attention,
            torch.full((len(rows), (heads + 2 * kv_heads) * head_dim), torch.nan, dtype=act),
            torch.full((num_pages * layout.page_bytes,), 0xFF, dtype=torch.uint8),
            torch.full((len(rows) + 3, max_pages), NOT_A_PAGE, dtype=torch.int32),
            torch.full((len(rows),), 10**6, dtype=torch.int32),
            torch.full((len(rows),), -1, dtype=torch.int32),
            torch.full((len(rows), heads, head_dim), torch.nan, dtype=torch.float64),
        )
        for r, row in enumerate(rows):
            if row is None:
                continue
            kept = (first_token_kept or {}).get(r, 0) // layout.page_size_tokens
            num_row_pages = -(-row.length // layout.page_size_tokens)
            pages = torch.tensor([free_pages.pop() for _ in range(num_row_pages)])
            slot = free_slots.pop()
            batch.page_table[slot, kept:num_row_pages] = pages[kept:].int()
            batch.context_lens[r], batch.slots[r] = row.length - 1, slot
            q, k, v = row.draw(attention, act)
            batch.qkv[r, : heads * head_dim] = q.flatten()
            keys, values = batch.write(pages, kept, k, 0), batch.write(pages, kept, v, 1)
            batch.expected[r] = reference(attention, q, keys, values)
        return batch

    def write(self, pages: Tensor, first_page: int, x: Tensor, which: int) -> Tensor:
        """x [length, KVH, D] into the pages; returns what they then mean."""
        layout = self.attention.layout
        numbers, scales, value = encode(x, layout.kv_dtype)
        blocks = self.cache.view(-1, 2, layout.num_kv_heads, layout.block_bytes)
        tokens = torch.arange(first_page * layout.page_size_tokens, len(x))
        page, place = pages[tokens // layout.page_size_tokens], tokens % layout.page_size_tokens
        for part, start in ((numbers, 0), (scales, layout.page_size_tokens * numbers.shape[-1])):
            end = start + layout.page_size_tokens * part.shape[-1]
            if part.numel():
                places = blocks[..., start:end].view(*blocks.shape[:-1], layout.page_size_tokens, part.shape[-1])
                places[page, which, :, place] = part[tokens]
        return value

    def run(self, launcher: Launcher = FAST, workspace: DecodeWorkspace | None = None) -> Tensor:
        """[R, H, D]"""
        workspace = workspace or poisoned_workspace(self.attention)
        out = torch.full((len(self.qkv), self.expected[0].numel()), torch.nan, dtype=self.qkv.dtype)
        self.attention.plan(launcher, workspace, self.context_lens, self.slots, len(self.slots))
        self.attention.attend(launcher, workspace, self.qkv, self.cache, self.page_table, out)
        assert not workspace.tickets.any()
        return out.view(self.expected.shape)

    def check(self, launcher: Launcher = FAST, tolerance: float | None = None) -> Tensor:
        out = self.run(launcher)
        planned = self.slots >= 0
        assert out[~planned].isnan().all()
        error = (out.double() - self.expected)[planned].abs().amax()
        limit = (tolerance or TOLERANCE[self.qkv.dtype]) * self.expected[planned].abs().amax()
        assert error <= limit, f"{error} > {limit}"
        return out


def poisoned_workspace(attention: DecodeAttention) -> DecodeWorkspace:
    workspace = attention.make_workspace("cpu")
    for tensor in (workspace.partial_out, workspace.partial_peaks):
        tensor.fill_(torch.nan)
    workspace.items.fill_(-1)
    workspace.num_items.fill_(-1)
    return workspace


def reference(attention: DecodeAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    first = max(len(keys) - attention.window_tokens, 0) if attention.window_tokens else 0
    group = attention.num_heads // attention.layout.num_kv_heads
    grouped = q.double().view(-1, group, q.shape[-1])
    logits = torch.einsum("kgd,tkd->kgt", grouped, keys[first:]) * attention.scale
    if attention.softcap:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    return torch.einsum("kgt,tkd->kgd", logits.softmax(-1), values[first:]).flatten(0, 1)


MORE_CACHES = [
    (64, "q8_0"),
    (96, "q8_0"),
    (256, "q8_0"),
    (64, "fp8"),
    (80, "fp8"),
    (128, "fp8"),
    (80, "fp32"),
    (256, "fp32"),
]


@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(head_dim, "bf16") for head_dim in HEAD_DIMS] + MORE_CACHES)
def test_every_head_size_and_cache_equals_float64(head_dim: int, kv_dtype: str) -> None:
    attention = attention_of(head_dim, kv_dtype, page_size=32)
    Batch.of(attention, rows_of(1, 31, 77, 300), ACT_OF[kv_dtype]).check()


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_lengths_around_pages_and_chunks(kv_dtype: str, page_size: int) -> None:
    lengths = [1, page_size - 1, page_size, page_size + 1, 255, 256, 257, 511, 512, 513]
    attention = attention_of(64, kv_dtype, page_size=page_size, kv_heads=1)
    Batch.of(attention, rows_of(*lengths), ACT_OF[kv_dtype]).check()


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_groups(kv_dtype: str, group: int) -> None:
    attention = attention_of(64, kv_dtype, group=group)
    Batch.of(attention, rows_of(1, 40, 290), ACT_OF[kv_dtype]).check()


@pytest.mark.parametrize("act", list(TOLERANCE))
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_queries_and_outputs_of_every_type(kv_dtype: str, act: torch.dtype) -> None:
    tolerance = max(TOLERANCE[act], 1e-5 if kv_dtype == "fp32" else 1e-2 if kv_dtype == "bf16" else 2e-3)
    Batch.of(attention_of(64, kv_dtype), rows_of(3, 270), act).check(tolerance=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("window", [1, 17, 100, 300, 1000])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0"])
def test_a_window_reads_no_page_before_it(kv_dtype: str, window: int, softcap: float) -> None:
    attention = attention_of(64, kv_dtype, kv_heads=1, window=window, softcap=softcap)
    lengths = [1, window, window + 1, window + 15, 700]
    kept = {row: max(length - window, 0) for row, length in enumerate(lengths)}
    Batch.of(attention, rows_of(*lengths), ACT_OF[kv_dtype], first_token_kept=kept).check()


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_long_ragged_batches_in_any_order_of_threads(kv_dtype: str) -> None:
    attention = attention_of(128, kv_dtype, page_size=32, num_sms=8)
    batch = Batch.of(attention, rows_of(4096, 1, 700, 33, 1500), ACT_OF[kv_dtype])
    first, *others = (batch.check(launcher) for launcher in ORDERS)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("length", [4096, 4097, 9000])
def test_chunks_grow_so_that_a_row_has_few_of_them(length: int) -> None:
    attention = attention_of(64, kv_heads=16, group=1, page_size=64, max_context=1 << 17)
    assert attention.max_chunks == 16
    batch = Batch.of(attention, rows_of(length))
    batch.check()
    assert planned_items(batch)[-1][3] + 1 == -(-length // (256 if length == 4096 else 512 if length == 4097 else 1024))


@pytest.mark.parametrize("launcher", CHECKED, ids=["forward", "reverse", "random"])
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_no_races_and_nothing_out_of_bounds(kv_dtype: str, launcher: Launcher) -> None:
    attention = attention_of(64, kv_dtype, group=3, num_sms=2)
    Batch.of(attention, [Row(1, 0), None, Row(40, 1), Row(300, 2), Row(530, 3)], ACT_OF[kv_dtype]).check(launcher)


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(80, "bf16"), (256, "bf16"), (96, "q8_0"), (80, "fp8"), (256, "fp32")]
)
def test_no_races_with_odd_and_large_heads(head_dim: int, kv_dtype: str) -> None:
    attention = attention_of(head_dim, kv_dtype, page_size=32, shared_bytes=SMALL_SHARED_BYTES, window=290, num_sms=2)
    Batch.of(attention, rows_of(30, 600), ACT_OF[kv_dtype]).check(CHECKED[0])


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_row_knows_nothing_of_its_batch_slot_pages_or_device(kv_dtype: str) -> None:
    act = ACT_OF[kv_dtype]
    row, others = Row(1100, 7), rows_of(5, 300, 2000)
    alone = Batch.of(attention_of(64, kv_dtype), [row], act).run()[0]
    for seed, place, shared_bytes in ((1, 0, H200_SHARED_BYTES), (2, 2, SMALL_SHARED_BYTES), (3, 3, H200_SHARED_BYTES)):
        attention = attention_of(64, kv_dtype, num_sms=1 + seed, shared_bytes=shared_bytes)
        rows = [*others[:place], row, *others[place:]]
        assert torch.equal(Batch.of(attention, rows, act, seed).run()[place], alone)
    other_pages = Batch.of(attention_of(64, kv_dtype, page_size=64, max_context=2000), [row], act).run()[0]
    assert torch.equal(other_pages, alone)


def test_a_workspace_serves_step_after_step() -> None:
    attention = attention_of()
    workspace = poisoned_workspace(attention)
    for seed, lengths in enumerate([(600, 20, 1000), (3,), (257, 600)]):
        batch = Batch.of(attention, rows_of(*lengths), seed=seed)
        assert torch.equal(batch.run(FAST, workspace), batch.run())


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_a_nan_stays_in_its_own_row(kv_dtype: str) -> None:
    class NaN(Row):
        def draw(self, attention: DecodeAttention, act: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().draw(attention, act)
            k[17, 0, 3] = torch.nan
            return q, k, v

    out = Batch.of(attention_of(64, kv_dtype), [Row(300, 0), NaN(300, 1), Row(20, 2)], ACT_OF[kv_dtype]).run()
    assert not out[[0, 2]].isnan().any()
    assert out[1, :4].isnan().all()
    assert not out[1, 4:].isnan().any()  # another KV head's


def test_a_batch_without_slots_computes_nothing() -> None:
    batch = Batch.of(attention_of(), [Row(20, 0), None])
    batch.slots.fill_(-1)
    assert batch.run().isnan().all()


def planned_items(batch: Batch) -> list[tuple[int, ...]]:
    workspace = poisoned_workspace(batch.attention)
    batch.attention.plan(FAST, workspace, batch.context_lens, batch.slots, len(batch.slots))
    return [tuple(item) for item in workspace.items[: int(workspace.num_items)].tolist()]


def test_the_plan_has_every_chunk_once_and_long_ones_first() -> None:
    lengths = [*range(1, 100, 7), 256, 257, 512, 700, 5000, 8192]
    attention = attention_of(num_pages=0, kv_heads=8, max_rows=len(lengths) + 1)
    rows: list[Row | None] = [None, *rows_of(*lengths)]
    batch = Batch.of(attention, rows)
    items = planned_items(batch)
    slots = batch.slots.tolist()
    wanted = [
        (row, slots[row], length, chunk) for row, length in enumerate(lengths, 1) for chunk in range(-(-length // 256))
    ]
    assert sorted(items) == sorted(wanted)
    tokens = [min(256, length - 256 * chunk) for _, _, length, chunk in items]
    assert all(later < 1.25 * earlier for earlier, later in pairwise(tokens))


def test_the_workspace_is_as_large_as_said_and_bounded() -> None:
    attention = attention_of(128, kv_heads=8, max_rows=256, max_context=1 << 17)
    workspace = attention.make_workspace("meta")
    tensors = [getattr(workspace, field.name) for field in fields(workspace)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == attention.workspace_bytes
    assert attention.workspace_bytes < 140e6
    assert attention_of(128, kv_heads=8, max_rows=256, max_context=1 << 24).workspace_bytes < 140e6


@pytest.mark.parametrize("shared_bytes", [SMALL_SHARED_BYTES, 164 * 1024, H200_SHARED_BYTES])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_blocks_fit_into_shared_memory(kv_dtype: str, head_dim: int, shared_bytes: int) -> None:
    if kv_dtype == "q8_0" and head_dim == 80:
        pytest.skip("no such cache")
    attention = attention_of(head_dim, kv_dtype, shared_bytes=shared_bytes)
    assert 30_000 <= attention.kernel.shared_bytes <= shared_bytes - 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 72}, "head_dim is 72, not one of 64, 80, 96, 128, 256"),
        ({"head_dim": 80, "kv_dtype": "q8_0"}, "head_dim is 80; a q8_0 cache needs a multiple of 32"),
        ({"kv_dtype": "int4"}, "kv_dtype is int4"),
        ({"page_size": 8}, "page_size_tokens is 8, not one of 16, 32, 64"),
        ({"group": 17}, "34 heads share 2 KV heads; each takes 1 to 16"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_context": 1 << 25}, "max_context_tokens is 33554432"),
        ({"window": -1}, "window_tokens is -1"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"shared_bytes": 48 * 1024, "head_dim": 256}, "49152 bytes of shared memory an SM are too few"),
    ],
)
def test_what_no_kernel_covers_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_of(**arguments)


def test_more_rows_than_the_workspace_has_are_refused() -> None:
    batch = Batch.of(attention_of(max_rows=1), rows_of(3, 4))
    with pytest.raises(ValueError, match="2 rows, of at most 1"):
        batch.run()


def test_the_manifest_has_every_head_size_and_cache_once() -> None:
    macros = [dict(kernel.macros) for kernel in kernels() if kernel.entry == "decode_attention"]
    assert len(macros) == len(HEAD_DIMS) * len(KV_MACRO) - 1
    assert len({tuple(m.items()) for m in macros}) == len(macros)
