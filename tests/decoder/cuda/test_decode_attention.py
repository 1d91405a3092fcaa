"""Decode attention on the emulator, against attention in float64 over the same quantised cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backend.passes.decoder.cuda.cache_layout import CacheLayout
from backend.passes.decoder.cuda.decode_attention import DecodeAttention, DecodeWorkspace, kernels
from backend.passes.decoder.cuda.launcher import Launcher
from backend.passes.decoder.kv_torch import quantise
from tests.cuda_emulator import EmulatedLauncher

H200_SHARED_BYTES = 228 * 1024
SMALL_SHARED_BYTES = 100 * 1024  # sm_86, sm_89, sm_120
FAST = EmulatedLauncher()
ORDERS = (FAST, EmulatedLauncher(order="reverse"), EmulatedLauncher(order="random", seed=3))
CHECKED = tuple(EmulatedLauncher("check", order, seed=5) for order in ("forward", "reverse", "random"))  # type: ignore[arg-type]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
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
        return q, *(torch.randn(2, self.length, kv_heads, head_dim, generator=generator) * 2)


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
        max_rows,
        max_context,
        num_sms,
        shared_bytes,
        window,
        softcap,
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
        rows: list[Row | None],
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
            rows = blocks[..., start:end].unflatten(-1, (layout.page_size_tokens, -1)) if part.numel() else None
            if rows is not None:
                rows[page, which, :, place] = part[tokens]
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
    grouped = q.double().unflatten(0, (-1, group))
    logits = torch.einsum("kgd,tkd->kgt", grouped, keys[first:]) * attention.scale
    if attention.softcap:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    return torch.einsum("kgt,tkd->kgd", logits.softmax(-1), values[first:]).flatten(0, 1)


BF16_DIMS = [(64, "bf16"), (80, "bf16"), (96, "bf16"), (128, "bf16"), (256, "bf16")]
OTHERS = [
    (64, "q8_0"),
    (96, "q8_0"),
    (256, "q8_0"),
    (64, "fp8"),
    (80, "fp8"),
    (128, "fp8"),
    (80, "fp32"),
    (256, "fp32"),
]


@pytest.mark.parametrize(("head_dim", "kv_dtype"), BF16_DIMS + OTHERS)
def test_every_head_size_and_cache_equals_float64(head_dim: int, kv_dtype: str) -> None:
    act = torch.float32 if kv_dtype == "fp32" else torch.bfloat16
    attention = attention_of(head_dim, kv_dtype, page_size=32)
    Batch.of(attention, rows_of(1, 31, 77, 300), act).check()


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0", "fp8"])
def test_lengths_around_pages_and_chunks(kv_dtype: str, page_size: int) -> None:
    lengths = [1, page_size - 1, page_size, page_size + 1, 255, 256, 257, 511, 512, 513]
    act = torch.float32 if kv_dtype == "fp32" else torch.bfloat16
    attention = attention_of(64, kv_dtype, page_size=page_size, kv_heads=1)
    Batch.of(attention, rows_of(*lengths), act).check()
