"""Every instantiation of every kernel that the project supports: tests compile them all, and emulate them."""

from __future__ import annotations

from collections.abc import Iterator

from backend.passes.decoder.cuda import decode_attention, elementwise, prefill_attention, sampling, step_buffers
from backend.passes.decoder.cuda.launcher import Kernel

FAMILIES = (step_buffers, elementwise, decode_attention, prefill_attention, sampling)


def kernels() -> Iterator[Kernel]:
    for family in FAMILIES:
        yield from family.kernels()
