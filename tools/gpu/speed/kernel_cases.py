"""Cases of attention and sampling: buffers, launches, and what they move and compute at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.forward_pass import SamplingParams, SlotInit
from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.cuda.attention.encoder_attention import EncoderAttention
from penstock.backend.passes.cuda.attention.prefill_attention import WGMMA_CAPABILITY, PrefillAttention
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.cuda.step.device_sampler import DeviceSampler, SlotArrays
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.random_weights import LLAMA_8B

PAGE_TOKENS = 32
_LLAMA_HEADS = HeadShape(LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
_QWEN3_EXPERTS = Experts(128, 8, 768, normalises=True)


@dataclass(frozen=True)
class KernelSizes:
    """Shapes of the cases: the 8B model's by default, with the experts of Qwen3 30B-A3B; smaller in tests."""

    heads: HeadShape = _LLAMA_HEADS
    hidden: int = LLAMA_8B.hidden_size
    intermediate: int = LLAMA_8B.intermediate_size
    vocab_size: int = LLAMA_8B.vocab_size
    sampling_rows: int = 256
    encoder_heads: int = 12
    experts: Experts = _QWEN3_EXPERTS
    expert_hidden: int = 2048
    cold_bytes: int = 1 << 30
    """Total bytes that are read in turn: many times the size of the L2 cache."""


@dataclass(frozen=True)
class PreparedCase:
    """Launches that do the same on different buffers, together larger than the L2 cache.

    num_bytes and flop are per launch: the least that it must move and compute.
    """

    works: list[Callable[[], object]]
    num_bytes: float = 0.0
    flop: float = 0.0
    way: str = ""
    """Names it among the cases of an item that compute the same."""


def decode(sizes: KernelSizes, context: DeviceContext, rows: int, tokens: int, kv_dtype: str) -> PreparedCase:
    """Decode attention. Counts each key and value once, scales included; the plan is not timed."""
    layout, make_plan, attend = _decode_step(sizes, context, rows, tokens, kv_dtype)
    num_bytes = rows * tokens * 2 * sizes.heads.num_kv_heads * layout.row_bytes
    caches = _caches(context, layout, -(-sizes.cold_bytes // num_bytes))
    make_plan()
    flop = 4.0 * rows * tokens * sizes.heads.output_size
    return PreparedCase([partial(attend, cache) for cache in caches], num_bytes, flop)


def _decode_step(
    sizes: KernelSizes, context: DeviceContext, rows: int, tokens: int, kv_dtype: str
) -> tuple[CacheLayout, Callable[[], object], Callable[[Tensor], object]]:
    """Return the cache's layout, the step's plan, and its attention over a cache."""
    heads, device, page_tokens = sizes.heads, context.device, context.choices.page_size_tokens
    pages_per_row = -(-tokens // page_tokens)
    layout = CacheLayout(1, rows * pages_per_row, page_tokens, heads.num_kv_heads, heads.head_dim, kv_dtype)
    attention = DecodeAttention(
        layout, heads.num_heads, heads.head_dim**-0.5, max_rows=rows, max_context_tokens=tokens,
        num_sms=device.num_sms, shared_bytes_per_sm=device.shared_bytes_per_sm, choices=context.choices,
    )  # fmt: skip
    device.launcher.prepare(attention.kernels())
    workspace = attention.make_workspace(context.torch_device)
    act = torch.float32 if kv_dtype == "fp32" else torch.bfloat16
    qkv = torch.randn(rows, heads.qkv_size, device=context.torch_device).to(act)
    out = torch.zeros(rows, heads.output_size, device=context.torch_device, dtype=act)
    page_table = _shuffled_pages(context, rows, pages_per_row)
    contexts = torch.full((rows,), tokens - 1, dtype=torch.int32, device=context.torch_device)
    slots = torch.arange(rows, dtype=torch.int32, device=context.torch_device)
    sinks = _no_sinks(sizes, context)

    def attend(cache: Tensor) -> None:
        attention.attend(device.launcher, workspace, qkv, cache, page_table, sinks, out)

    return layout, partial(attention.plan, device.launcher, workspace, contexts, slots, rows), attend


def prefill(sizes: KernelSizes, context: DeviceContext, history: int, tokens: int, kv_dtype: str) -> PreparedCase:
    heads, device = sizes.heads, context.device
    num_pages = -(-(history + tokens) // PAGE_TOKENS)
    layout = CacheLayout(1, num_pages, PAGE_TOKENS, heads.num_kv_heads, heads.head_dim, kv_dtype)
    has_wgmma = device.compute_capability == WGMMA_CAPABILITY
    attention = PrefillAttention(
        layout,
        heads.num_heads,
        heads.head_dim**-0.5,
        choices=context.choices,
        has_wgmma=has_wgmma,
        num_sms=device.num_sms,
    )
    device.launcher.prepare(attention.kernels())
    qkv = torch.randn(tokens, heads.qkv_size, device=context.torch_device).bfloat16()
    out = torch.zeros(tokens, heads.output_size, device=context.torch_device, dtype=torch.bfloat16)
    starts, contexts = np.array([0, tokens], np.int32), np.array([history], np.int32)
    tiles = torch.from_numpy(attention.tiles(starts, contexts)).to(context.torch_device)
    rows = _rows(context, [0, tokens], [history], [0])
    page_table = _shuffled_pages(context, 1, num_pages)
    (cache,) = _caches(context, layout, 1)
    workspace, sinks = attention.workspace_sizes(tokens, history + tokens), _no_sinks(sizes, context)
    attend = partial(
        attention.attend, device.launcher, workspace.make(context.torch_device), qkv, cache, page_table, rows, tiles,
        sinks, out,
    )  # fmt: skip
    pairs = tokens * history + tokens * (tokens + 1) / 2
    return PreparedCase([attend], flop=4 * pairs * heads.output_size)


def encoder(sizes: KernelSizes, context: DeviceContext, num_rows: int, tokens: int, window: int | None) -> PreparedCase:
    """An encoder's attention in bf16, with heads of 64."""
    device = context.torch_device
    attention = EncoderAttention(sizes.encoder_heads, 64, torch.bfloat16, 0.125)
    context.device.launcher.prepare([attention.kernel])
    width, starts = 64 * sizes.encoder_heads, np.arange(num_rows + 1, dtype=np.int32) * tokens
    qkv = torch.randn(num_rows * tokens, 3 * width, device=device).bfloat16()
    out = torch.zeros(num_rows * tokens, width, device=device, dtype=torch.bfloat16)
    row_starts, tiles = (torch.from_numpy(ints).to(device) for ints in (starts, attention.tiles(starts)))
    attend = partial(attention.attend, context.device.launcher, qkv, row_starts, tiles, out, window=window)
    seen = tokens if window is None else min(tokens, 2 * window + 1)
    return PreparedCase([attend], flop=4.0 * num_rows * tokens * seen * width)


_TOP_P = SamplingParams(temperature=0.8, top_p=0.9)
_SAMPLING = {
    "greedy": (SamplingParams(temperature=0.0), 3.0, 0.0),
    "plain": (SamplingParams(temperature=0.8), 3.0, 0.0),
    "top_p": (_TOP_P, 3.0, 0.0),
    "penalties": (SamplingParams(temperature=0.8, frequency_penalty=0.1, repetition_penalty=1.1), 3.0, 0.0),
    "filtered": (SamplingParams(temperature=0.8, top_k=50, top_p=0.9, typical_p=0.95, min_p=0.02), 3.0, 0.0),
    "flat": (_TOP_P, 0.5, 0.0),
    "peaked": (_TOP_P, 2.0, 14.0),
}
"""Deviation of all logits, and what is added to one of 2,000: top-p keeps most tokens of flat rows."""


def sampling(sizes: KernelSizes, context: DeviceContext, kind: str) -> PreparedCase:
    params, deviation, likely = _SAMPLING[kind]
    rows, vocab, device = sizes.sampling_rows, sizes.vocab_size, context.torch_device
    sampler = DeviceSampler(context.device.launcher, SlotArrays(rows, vocab, device), torch.bfloat16)
    context.device.launcher.prepare(sampler.kernels)
    logits = [torch.randn(rows, vocab, device=device) * deviation for _ in range(4)]
    for x in logits:
        x[:, ::2000] += likely
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    contexts, tokens = torch.full_like(slots, 100), torch.zeros_like(slots)
    prompt = np.arange(100, dtype=np.int32)
    packed = sampler.pack([SlotInit(slot, params, prompt, len(prompt)) for slot in range(rows)])
    sampler.take_slots(torch.from_numpy(packed).to(device), rows)
    features = sampler.features(np.arange(rows, dtype=np.int32))
    works: list[Callable[[], object]] = [
        partial(sampler.sample, x.bfloat16(), slots, contexts, features, tokens) for x in logits
    ]
    return PreparedCase(works, 2.0 * rows * vocab)


def make_elementwise(sizes: KernelSizes, context: DeviceContext) -> Elementwise:
    made = Elementwise(
        context.device.launcher, sizes.heads, sizes.hidden, sizes.heads.head_dim, 1e-5, torch.bfloat16, "bf16",
        PAGE_TOKENS, context.torch_device,
    )  # fmt: skip
    context.device.launcher.prepare(made.kernels)
    return made


def _rows(context: DeviceContext, *values: list[int]) -> RowArrays:
    return RowArrays(*(torch.tensor(x, dtype=torch.int32, device=context.torch_device) for x in values))


def _no_sinks(sizes: KernelSizes, context: DeviceContext) -> Tensor:
    return torch.full((sizes.heads.num_heads,), -torch.inf, device=context.torch_device)


def _caches(context: DeviceContext, layout: CacheLayout, count: int) -> list[Tensor]:
    caches = [torch.empty(layout.num_bytes, dtype=torch.uint8, device=context.torch_device) for _ in range(count)]
    for cache in caches:
        fill_cache(cache, layout)
    return caches


def _shuffled_pages(context: DeviceContext, num_rows: int, pages_per_row: int) -> Tensor:
    """int32 [rows, pages] page table of distinct pages in random order."""
    pages = np.random.default_rng(0).permutation(num_rows * pages_per_row).astype(np.int32)
    return torch.from_numpy(pages.reshape(num_rows, pages_per_row)).to(context.torch_device)
