"""Every instantiation of every kernel that the project supports: tests compile them all, and emulate them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.backend.passes.decoder.cuda import elementwise, sampling, step_buffers
from penstock.backend.passes.decoder.cuda.attention import decode_attention, prefill_attention
from penstock.backend.passes.decoder.cuda.launch.launcher import Kernel

FAMILIES = (step_buffers, elementwise, decode_attention, prefill_attention, sampling)


def kernels() -> Iterator[Kernel]:
    for family in FAMILIES:
        yield from family.kernels()
