"""KV caches for measurements: filled with realistic numbers, and copied page by page with the copy kernel.

Zeros would draw less power, and random bits may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.backend.passes.cuda.memory import page_moves
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.ops.interface import KV_BLOCK_VALUES
from penstock.tools.gpu.devices.device_context import DeviceContext

_PIECE_BLOCKS = 1 << 14
_SCALE = 0.02
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@torch.inference_mode()
def fill_cache(cache: Tensor, layout: CacheLayout) -> None:
    """Fill a uint8 cache of whole blocks (see `CacheLayout`) with copies of one random piece."""
    blocks = cache.view(-1, layout.block_bytes)
    piece = _draw_blocks(min(len(blocks), _PIECE_BLOCKS), layout, cache.device)
    for start in range(0, len(blocks), len(piece)):
        part = blocks[start : start + len(piece)]
        part.copy_(piece[: len(part)])


def _draw_blocks(count: int, layout: CacheLayout, device: torch.device) -> Tensor:
    """uint8 [count, block_bytes]"""
    values = layout.page_size_tokens * layout.head_dim
    if layout.kv_dtype != "q8_0":
        return torch.randn(count, values, device=device).to(_DTYPES[layout.kv_dtype]).view(torch.uint8)
    numbers = torch.randint(-127, 128, (count, values), device=device, dtype=torch.int8).view(torch.uint8)
    scales = torch.rand(count, values // KV_BLOCK_VALUES, device=device).mul_(_SCALE).half().view(torch.uint8)
    return torch.cat([numbers, scales], dim=1)


def cache_shape(layout: CacheLayout) -> tuple[int, int, int]:
    return layout.num_layers, layout.num_pages, layout.page_bytes


def make_page_copier(context: DeviceContext) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A function of source, destination and pairs: see `page_moves.copy_pages`."""
    launcher = context.device.launcher
    launcher.prepare(page_moves.kernels())
    return partial(page_moves.copy_pages, launcher)
