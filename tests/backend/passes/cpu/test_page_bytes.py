"""A page of all layers becomes bytes, and another cache's page again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.backend.passes.cpu.in_torch.paged_cache import KvShape, PagedCache
from penstock.backend.passes.cpu.native_cache import NativeCache
from tests.backend.passes.cpu.ops_harness import BASE

NUM_PAGES = 3
BYTES_PER_TOKEN = {"fp32": 2 * 2 * 64 * 4, "bf16": 2 * 2 * 64 * 2, "q8_0": 2 * 2 * 2 * 34, "kernels": 2 * 2 * 64 * 2}
"""KV bytes of two layers with one head of 32 each."""


def random_cache(kv_dtype: str, seed: int) -> NativeCache | PagedCache:
    generator = torch.Generator().manual_seed(seed)

    def random_bytes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    if kv_dtype == "kernels":
        own = NativeCache(BASE, ())
        own.create(2, NUM_PAGES, 4, "bf16")
        for layer in own.arrays:
            layer[:] = random_bytes(*layer.shape).numpy()
        return own
    cache = PagedCache([KvShape(1, 64, 64)] * 2, NUM_PAGES, 4, kv_dtype)
    for page in range(NUM_PAGES):
        for part in cache.parts(page):
            part.copy_(random_bytes(part.numel() * part.element_size()).view(part.dtype).view(part.shape))
    return cache


def page_of(cache: NativeCache | PagedCache, page: int, num_bytes: int) -> np.ndarray:
    content = np.zeros(num_bytes, np.uint8)
    cache.save(page, content)
    return content


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0", "kernels"])
def test_page_is_the_same_bytes_in_another_cache_and_no_other_page_changes(kv_dtype: str) -> None:
    num_bytes = 4 * BYTES_PER_TOKEN[kv_dtype]
    one, other = random_cache(kv_dtype, 1), random_cache(kv_dtype, 2)
    saved = page_of(one, 2, num_bytes)
    before = [page_of(other, page, num_bytes) for page in range(NUM_PAGES)]
    other.restore(0, saved)
    after = [page_of(other, page, num_bytes) for page in range(NUM_PAGES)]
    assert len(np.unique(saved)) > 16
    np.testing.assert_array_equal(after, [saved, *before[1:]])
