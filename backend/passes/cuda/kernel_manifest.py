"""Lists every supported instantiation of every kernel. Tests compile and emulate them all."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.backend.passes.cuda.attention import (
    decode_attention,
    delta_net,
    encoder_attention,
    prefill_attention,
    wide_attention,
)
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.cuda.memory import lora, page_moves
from penstock.backend.passes.cuda.ops import (
    elementwise,
    expert_ops,
    quantized_linear,
    rounded_rows,
    row_products,
    side_ops,
)
from penstock.backend.passes.cuda.step import device_sampler, draft_sampling, step_buffers

FAMILIES = (
    step_buffers,
    elementwise,
    expert_ops,
    quantized_linear,
    lora,
    rounded_rows,
    row_products,
    side_ops,
    page_moves,
    decode_attention,
    prefill_attention,
    encoder_attention,
    delta_net,
    wide_attention,
    device_sampler,
    draft_sampling,
)


def kernels() -> Iterator[Kernel]:
    for family in FAMILIES:
        yield from family.kernels()
