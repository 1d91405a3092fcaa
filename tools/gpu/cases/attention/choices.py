"""Checks that attention is right with every setting of the kernels that a file of choices may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.backend.passes.cuda.attention.decode_attention import SM_SHARED_BYTES
from penstock.backend.passes.cuda.device.kernel_choices import ALLOWED, CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import Kernel, Launcher
from penstock.tools.gpu.cases.attention import decode, prefill
from penstock.tools.gpu.cases.check import Check, check_of, require_within

_HEAD_DIM = 128
# Carve-outs last: kernels that differ in this alone are one function of the driver, which keeps the last setting.
_OF_DECODE = ("page_size_tokens", "ring_tiles", "chunk_tokens", "chunk_levels", "carveout_percent")
DECODE_CHOICES: dict[str, KernelChoices] = {
    f"{name}.{value}": replace(CONSTANTS, **{name: value})
    for name in _OF_DECODE
    for value in ALLOWED[name]
    if value != getattr(CONSTANTS, name)
}
PREFILL_CHOICES: dict[str, KernelChoices] = {
    f"{rows}+{tokens}": replace(CONSTANTS, query_rows=rows, key_tokens=tokens, wgmma=0)
    for rows in ALLOWED["query_rows"]
    for tokens in ALLOWED["key_tokens"]
}
"""The tiles of the kernel with mma.sync."""
_PREFILL_KV_DTYPES = ("bf16", "q8_0")


def choice_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield a check of each setting that is not the constant. shared_bytes: of one of the device's multiprocessors."""
    for name, settings in DECODE_CHOICES.items():
        yield check_of("choices", name, check_decode, choices=settings, shared_bytes=shared_bytes)
    for name, settings in PREFILL_CHOICES.items():
        for kv_dtype in _PREFILL_KV_DTYPES:
            yield check_of("choices", f"{name}.{kv_dtype}", check_prefill, choices=settings, kv_dtype=kv_dtype)


def check_decode(launcher: Launcher, choices: KernelChoices, shared_bytes: int) -> float:
    """Check lengths around a chunk, and rows of several chunks."""
    tokens = choices.chunk_tokens
    attention = decode.attention_of(
        _HEAD_DIM, kv_heads=1, page_size=choices.page_size_tokens, shared_bytes=shared_bytes, choices=choices
    )
    case = decode.DecodeCase.of(attention, decode.rows_of(1, tokens - 1, tokens, tokens + 1, 3 * tokens + 70))
    out = case.run(launcher)
    return require_within("error relative to the largest output of a row", case.error(out), decode.TOLERANCE[out.dtype])


def check_prefill(launcher: Launcher, choices: KernelChoices, kv_dtype: str) -> float:
    attention = prefill.attention_of(_HEAD_DIM, kv_dtype, group=4, choices=choices)
    step = prefill.prepare(attention, prefill.rows_of((0, 1), (70, 80), (30, 3)))
    error = prefill.error_of(attention, step, prefill.run(attention, step, launcher))
    return require_within("relative error of a query", error, prefill.TOLERANCE[kv_dtype])


def kernels() -> Iterator[Kernel]:
    """Yield the instantiations that are checked here, for devices with SM_SHARED_BYTES."""
    for settings in DECODE_CHOICES.values():
        for shared_bytes in SM_SHARED_BYTES:
            yield from decode.attention_of(_HEAD_DIM, shared_bytes=shared_bytes, choices=settings).kernels()
    for settings in PREFILL_CHOICES.values():
        for kv_dtype in _PREFILL_KV_DTYPES:
            yield from prefill.attention_of(_HEAD_DIM, kv_dtype, choices=settings).kernels()
