"""Puts the lists of all kernels' checks together: a wide set, and a small set for each kernel."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.tools.gpu.cases import elementwise, sampling, streams
from penstock.tools.gpu.cases import ptx_wrappers as wrappers
from penstock.tools.gpu.cases.attention import catalogue as attention
from penstock.tools.gpu.cases.attention.decode import H200_SHARED_BYTES
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.cases.products import catalogue as products


def wide_checks(shared_bytes: int = H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield all checks. shared_bytes: shared memory of one of the device's multiprocessors."""
    for name, run in wrappers.WRAPPERS.items():
        yield Check("ptx", name, run)
    yield from elementwise.wide_checks()
    yield from streams.checks(2048)
    yield from products.wide_checks()
    yield from sampling.wide_checks()
    yield from attention.wide_checks(shared_bytes)


def small_checks(shared_bytes: int = H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield small checks that cover each kernel source and KV dtype: under a sanitizer everything is slow."""
    yield from attention.small_checks(shared_bytes)
    yield from elementwise.small_checks()
    yield from streams.checks(72)
    yield from products.small_checks()
    yield from sampling.small_checks()


def invariance_checks(shared_bytes: int = H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield checks that a row's bits do not depend on other rows, slots, pages or chunk sizes."""
    yield from attention.invariance_checks(shared_bytes)
    yield from products.invariance_checks()
    yield from sampling.invariance_checks()


def small_wgmma_checks() -> Iterator[Check]:
    """Yield the small checks of kernels that only compute capability 9.0 has."""
    for name, run in wrappers.HOPPER_WRAPPERS.items():
        yield Check("wgmma", name, run)
    yield from attention.small_wgmma_checks()


def wgmma_checks() -> Iterator[Check]:
    """Yield all checks of such kernels."""
    yield from small_wgmma_checks()
    yield from attention.segment_checks("bf16", has_wgmma=True)
