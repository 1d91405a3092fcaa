"""The kernels' settings that are measured, and checks that results are right with each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda.attention.decode_attention import SM_SHARED_BYTES
from penstock.backend.passes.decoder.cuda.device.kernel_choices import CONSTANTS, DRIVERS_CHOICE, KernelChoices
from penstock.tools.gpu_check.cases.attention import decode, prefill
from penstock.tools.gpu_check.cases.check import Check
from penstock.tools.gpu_check.cases.comparing import require_within

if TYPE_CHECKING:
    from penstock.backend.passes.decoder.cuda.device.launcher import Kernel, Launcher

_HEAD_DIM = 128
DECODE_VARIANTS: dict[str, dict[str, KernelChoices]] = {
    "page_size_tokens": {str(tokens): replace(CONSTANTS, page_size_tokens=tokens) for tokens in (16, 32, 64)},
    "ring_tiles": {str(tiles): replace(CONSTANTS, ring_tiles=tiles) for tiles in (8, 5, 4, 3)},
    "chunk_tokens": {str(tokens): replace(CONSTANTS, chunk_tokens=tokens) for tokens in (128, 256, 512)},
    # Last: kernels that differ in this alone are one function of the driver, which keeps the last setting.
    "carveout_percent": {
        str(percent): replace(CONSTANTS, carveout_percent=percent) for percent in (100, 75, 50, DRIVERS_CHOICE)
    },
}
"""Setting of decode attention → the choice in words → the settings."""
PREFILL_VARIANTS: dict[str, dict[str, KernelChoices]] = {
    "query_rows+key_tokens+wgmma": {
        f"{rows}+{tokens}+{wgmma}": replace(CONSTANTS, query_rows=rows, key_tokens=tokens, wgmma=wgmma)
        for rows, tokens, wgmma in ((128, 64, 1), (128, 64, 0), (128, 32, 0), (64, 64, 0), (64, 32, 0))
    },
}
"""The same for prefill attention: the kernel with wgmma, whose tiles are its own, or mma.sync with one of its tiles."""


def choice_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield a check of each setting that is not the constant. shared_bytes: of one of the device's multiprocessors."""
    for name, choice, settings in _changed(DECODE_VARIANTS):
        run = partial(check_decode, choices=settings, shared_bytes=shared_bytes)
        yield Check("choices", f"{name}.{choice}", run)
    for name, choice, settings in _changed(PREFILL_VARIANTS):
        for kv_dtype in ("bf16", "q8_0"):
            run = partial(check_prefill, choices=settings, kv_dtype=kv_dtype)
            yield Check("choices", f"{name}.{choice}.{kv_dtype}", run)


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
    """Yield the instantiations that are checked and timed here, for devices with SM_SHARED_BYTES."""
    for _, _, settings in _changed(DECODE_VARIANTS):
        for shared_bytes in SM_SHARED_BYTES:
            yield from decode.attention_of(_HEAD_DIM, shared_bytes=shared_bytes, choices=settings).kernels()
    for _, _, settings in _changed(PREFILL_VARIANTS):
        for kv_dtype in ("bf16", "q8_0"):
            yield from prefill.attention_of(_HEAD_DIM, kv_dtype, choices=settings).kernels()


def _changed(variants: dict[str, dict[str, KernelChoices]]) -> Iterator[tuple[str, str, KernelChoices]]:
    for name, choices in variants.items():
        yield from ((name, choice, settings) for choice, settings in choices.items() if settings != CONSTANTS)
