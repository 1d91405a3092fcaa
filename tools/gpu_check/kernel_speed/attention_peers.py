"""Times other attention implementations: torch's SDPA and flex attention on contiguous KV, FlashAttention 3."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.backend.passes.decoder.ops import HeadShape
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.reporting.results import Results

DECODE = (("64x1k", 64, 1024), ("8x4k", 8, 4096), ("1x1k", 1, 1024))
PREFILL = (("4k", 4096), ("8k", 8192))
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_FLEX_S = 40.0
"""Seconds that must be left to start flex attention, which is compiled first."""


def measure(
    results: Results,
    context: DeviceContext,
    heads: HeadShape,
    decode: tuple[tuple[str, int, int], ...] = DECODE,
    prefill: tuple[tuple[str, int], ...] = PREFILL,
    backends: dict[str, SDPBackend] = BACKENDS,
    cold_bytes: int = 1 << 30,
) -> None:
    """cold_bytes: size of the keys and values that decode attention reads in turn, many times the L2 cache's."""
    for backend, kind in backends.items():
        for name, rows, tokens in decode:
            work = partial(_sdpa, context, heads, rows, 1, tokens, kind, cold_bytes)
            _record(results, f"peer.{backend}.decode.{name}", work, _kv_bytes(heads, rows, tokens), "TB/s")
        for name, tokens in prefill:
            work = partial(_sdpa, context, heads, 1, tokens, tokens, kind, 0)
            _record(results, f"peer.{backend}.prefill.{name}", work, _causal_flop(heads, tokens), "TFLOP/s")
    _flash_attention_3(results, context, heads, decode, prefill, cold_bytes)
    name, tokens = prefill[0]
    if results.remaining_s > _FLEX_S:
        work = partial(_flex, context, heads, tokens)
        _record(results, f"peer.flex.prefill.{name}", work, _causal_flop(heads, tokens), "TFLOP/s")


def _record(results: Results, name: str, work_us: Callable[[], float], amount: float, unit: str) -> None:
    """Record a peer's time and rate. A peer that fails is skipped and fails no check."""
    if results.remaining_s <= 0:
        return
    try:
        us = work_us()
    except Exception as error:  # noqa: BLE001 - a peer's error is recorded, not ours to raise
        results.skipped(name, str(error).strip().partition("\n")[0][:200])
        return
    results.fact(name, amount / us / 1e6, unit)
    results.fact(f"{name}.time", us, "us")


def _kv_bytes(heads: HeadShape, num_rows: int, num_tokens: int) -> float:
    return float(num_rows * num_tokens * 2 * heads.num_kv_heads * heads.head_dim * 2)


def _causal_flop(heads: HeadShape, num_tokens: int) -> float:
    return 4 * num_tokens * (num_tokens + 1) / 2 * heads.output_size


def _draw(context: DeviceContext, *shape: int) -> Tensor:
    return torch.randn(shape, device=context.torch_device).bfloat16()


def _sdpa(
    context: DeviceContext,
    heads: HeadShape,
    num_rows: int,
    num_queries: int,
    num_tokens: int,
    backend: SDPBackend,
    cold_bytes: int,
) -> float:
    """Time SDPA. The queries are all tokens (causal) or the last one."""
    q = _draw(context, num_rows, heads.num_heads, num_queries, heads.head_dim)
    sets = [
        [_draw(context, num_rows, heads.num_kv_heads, num_tokens, heads.head_dim) for _ in range(2)]
        for _ in range(max(1, cold_bytes // int(_kv_bytes(heads, num_rows, num_tokens))))
    ]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=num_queries > 1, enable_gqa=True)
    with sdpa_kernel(backend):
        return context.clock.work_us([partial(attend, q, k, v) for k, v in sets])


def _flex(context: DeviceContext, heads: HeadShape, num_tokens: int) -> float:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, num_tokens, num_tokens, device=str(context.torch_device))
    q = _draw(context, 1, heads.num_heads, num_tokens, heads.head_dim)
    k, v = (_draw(context, 1, heads.num_kv_heads, num_tokens, heads.head_dim) for _ in range(2))
    compiled: Any = torch.compile(flex_attention)
    return context.clock.work_us([lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)])


def _flash_attention_3(
    results: Results,
    context: DeviceContext,
    heads: HeadShape,
    decode: tuple[tuple[str, int, int], ...],
    prefill: tuple[tuple[str, int], ...],
    cold_bytes: int,
) -> None:
    """Time FlashAttention 3, if `flash_attn_interface` is installed or in --peers."""
    try:
        module: Any = importlib.import_module("flash_attn_interface")
    except Exception as error:  # noqa: BLE001 - not installed, or built for something else
        results.skipped("peer.fa3", f"flash_attn_interface: {str(error).strip().partition(chr(10))[0][:200]}")
        return
    for name, tokens in prefill:
        q, k, v = (_draw(context, tokens, n, heads.head_dim) for n in (heads.num_heads, *[heads.num_kv_heads] * 2))
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=context.torch_device)
        # vLLM builds no kernels for batches of equal lengths.
        attend = partial(module.flash_attn_varlen_func, q, k, v, starts, starts, tokens, tokens, causal=True)
        work = partial(context.clock.work_us, [attend])
        _record(results, f"peer.fa3.prefill.{name}", work, _causal_flop(heads, tokens), "TFLOP/s")
    for name, rows, tokens in decode:
        work = partial(_paged_fa3, context, module, heads, rows, tokens, cold_bytes)
        _record(results, f"peer.fa3.decode.{name}", work, _kv_bytes(heads, rows, tokens), "TB/s")


def _paged_fa3(
    context: DeviceContext, module: Any, heads: HeadShape, num_rows: int, num_tokens: int, cold_bytes: int
) -> float:
    page = 64
    num_pages = num_rows * num_tokens // page
    table = torch.randperm(num_pages, device=context.torch_device).int().view(num_rows, -1)
    lengths = torch.full((num_rows,), num_tokens, dtype=torch.int32, device=context.torch_device)
    q = _draw(context, num_rows, 1, heads.num_heads, heads.head_dim)
    sets = [
        [_draw(context, num_pages, page, heads.num_kv_heads, heads.head_dim) for _ in range(2)]
        for _ in range(max(1, cold_bytes // int(_kv_bytes(heads, num_rows, num_tokens))))
    ]
    attend = partial(module.flash_attn_with_kvcache, cache_seqlens=lengths, page_table=table, causal=True)
    return context.clock.work_us([partial(attend, q, k, v) for k, v in sets])
