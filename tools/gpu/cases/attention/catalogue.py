"""Lists the checks of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.decode_attention import SM_SHARED_BYTES
from penstock.backend.passes.cuda.attention.encoder_attention import DTYPES as ENCODER_DTYPES
from penstock.backend.passes.cuda.attention.encoder_attention import PUBLISHED_HEAD_DIMS
from penstock.backend.passes.cuda.attention.kernel_limits import HEAD_DIMS
from penstock.backend.passes.cuda.device.kernel_choices import ALLOWED, CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import Kernel, Launcher
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from penstock.backend.passes.ops.interface import HeadShape, supports_q8_0
from penstock.tools.gpu.cases.attention import decode, delta_net, encoder, prefill, wide
from penstock.tools.gpu.cases.attention.delta_net import DeltaCase
from penstock.tools.gpu.cases.attention.encoder import EncoderCase
from penstock.tools.gpu.cases.attention.paged_rows import Row
from penstock.tools.gpu.cases.attention.wide import WideCase
from penstock.tools.gpu.cases.check import Check, check_of, require_same_bits, require_within
from penstock.tools.gpu.cases.elementwise import DTYPES, StoreCase

_GROUPS = (1, 2, 4, 7, 8, 16)
_OTHER_HEAD_DIMS = (24, 72)
"""Of encoders, whose kernels no manifest lists."""
_PAGE_SIZES_TOKENS = (16, 32, 64)
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


def wide_checks(shared_bytes: int) -> Iterator[Check]:
    """shared_bytes: shared memory of one of the device's multiprocessors."""
    yield from encoder_checks()
    yield from delta_checks()
    yield from wide_head_checks()
    yield check_of("decode", "plan", decode.check_plan)
    for number, (kv_dtype, head_dim) in enumerate(_caches()):
        for group in _GROUPS:
            page_size = _PAGE_SIZES_TOKENS[(number + group) % 3]
            yield _decode(shared_bytes, kv_dtype, head_dim, group, page_size, (1, 31, 77, 300), repeats=3)
            yield _prefill(kv_dtype, head_dim, group, page_size, ((0, 1), (40, 1), (0, 33), (70, 80)), repeats=3)
    for kv_dtype in KV_MACRO:
        for page_size in _PAGE_SIZES_TOKENS:
            around = (1, page_size - 1, page_size, page_size + 1, 255, 256, 257, 511, 512, 513)
            yield _decode(shared_bytes, kv_dtype, 128, 4, page_size, around)
            shapes = [(0, edge) for edge in around[:4]] + [(edge, 3) for edge in around[:4]] + [(65, 130), (63, 64)]
            yield _prefill(kv_dtype, 128, 4, page_size, tuple(shapes))
        for window in (1, 17, 300):
            yield _decode(shared_bytes, kv_dtype, 64, 2, 16, (1, window, window + 1, 700), window=window, softcap=3.0)
            yield _prefill(kv_dtype, 64, 2, 16, ((0, 150), (208, 70), (5, 3)), window=window, softcap=3.0)
        yield _decode(shared_bytes, kv_dtype, 128, 4, 32, (4096, 1, 700, 33, 1500), repeats=3)
        yield _prefill(kv_dtype, 128, 4, 32, ((2000, 30), (0, 300), (777, 129)), repeats=3)
        for name, check in (("steep", decode.check_steep), ("long_chunk", decode.check_long_chunk)):
            yield check_of("decode", f"{name}.{kv_dtype}", check, kv_dtype=kv_dtype, shared_bytes=shared_bytes)
        if kv_dtype != "fp32":  # whose contexts are not cut
            yield from segment_checks(kv_dtype)
        yield check_of("prefill", f"steep.{kv_dtype}", prefill.check_steep, kv_dtype=kv_dtype)


def small_checks(shared_bytes: int) -> Iterator[Check]:
    for kv_dtype in KV_MACRO:
        yield _decode(shared_bytes, kv_dtype, 64, 3, 16, (1, 40, 300))
        yield _prefill(kv_dtype, 64, 3, 16, ((70, 1), (0, 20), (60, 9)))
    for dtype, name in ENCODER_DTYPES.items():
        local = EncoderCase(24, dtype, (9, 70), window=20, has_bias=True)  # three chunks a row, and one of zeros
        yield check_of("encoder", f"small.{name}", encoder.check_attention, case=local)
    yield _decode(shared_bytes, "bf16", 256, 1, 32, (30,), window=20)
    yield _prefill("bf16", 80, 1, 32, ((64, 20),), window=20)
    yield _prefill("fp8", 128, 2, 32, ((35, 60), (2035, 30)), sees_ahead=True)
    case = DeltaCase.of(64, 16, torch.bfloat16)
    yield check_of("delta_net", "small", delta_net.check_delta, case=case)
    yield check_of("wide", "small", wide.check_wide, case=WideCase(512, "q8_0", torch.bfloat16))


def invariance_checks(shared_bytes: int) -> Iterator[Check]:
    for kv_dtype in KV_MACRO:
        beside = _decode_beside_other_rows
        yield check_of("decode", f"company.{kv_dtype}", beside, kv_dtype=kv_dtype, shared_bytes=shared_bytes)
        yield check_of("prefill", f"cut.{kv_dtype}", _prefill_in_any_chunks, kv_dtype=kv_dtype)
    for dtype, name in ENCODER_DTYPES.items():
        yield check_of("encoder", f"company.{name}", encoder.check_company, dtype=dtype)
    yield check_of("delta_net", "cut", delta_net.check_delta_cuts, case=DeltaCase.of(128, 64, torch.bfloat16))
    yield check_of("wide", "cut", wide.check_wide_cuts, case=WideCase(256, "bf16", torch.bfloat16))


def small_wgmma_checks() -> Iterator[Check]:
    shapes = ((0, 1), (40, 1), (0, 33), (170, 80))
    yield _prefill("bf16", 128, 4, 32, shapes, repeats=3, has_wgmma=True)
    yield _prefill("bf16", 64, 7, 16, shapes, window=70, softcap=3.0, has_wgmma=True)
    for kv_dtype, head_dim in (("bf16", 80), ("bf16", 256), ("q8_0", 96), ("q8_0", 128), ("fp8", 128)):
        yield _prefill(kv_dtype, head_dim, 3, 32, shapes, has_wgmma=True)
    yield check_of("wgmma", "cut", _prefill_in_any_chunks, kv_dtype="bf16", has_wgmma=True)


def segment_checks(kv_dtype: str, *, has_wgmma: bool = False) -> Iterator[Check]:
    family = "wgmma" if has_wgmma else "prefill"
    attention = prefill.attention_of(128, kv_dtype, group=4, page_size=32, has_wgmma=has_wgmma)
    for name, shapes in (("segments", prefill.SEGMENTED), ("far_segments", prefill.FAR_SEGMENTS)):
        yield check_of(family, f"{name}.{kv_dtype}", prefill.check_segments, attention=attention, shapes=shapes)


def choice_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield a check of each setting that a GPU's record may have, if it is not the constant."""
    for name, settings in DECODE_CHOICES.items():
        tokens, page_size = settings.chunk_tokens, settings.page_size_tokens
        lengths = (1, tokens - 1, tokens, tokens + 1, 3 * tokens + 70)
        check = _decode(shared_bytes, "bf16", 128, 4, page_size, lengths, kv_heads=1, choices=settings)
        yield replace(check, family="choices", name=name)
    for name, settings in PREFILL_CHOICES.items():
        for kv_dtype in ("bf16", "q8_0"):
            check = _prefill(kv_dtype, 128, 4, 16, ((0, 1), (70, 80), (30, 3)), choices=settings)
            yield replace(check, family="choices", name=f"{name}.{kv_dtype}")


def unlisted_kernels() -> Iterator[Kernel]:
    """Yield the instantiations of `choice_checks`, for devices with SM_SHARED_BYTES, and encoders' other ones."""
    for head_dim, dtype in product(_OTHER_HEAD_DIMS, ENCODER_DTYPES):
        yield EncoderCase(head_dim, dtype).attention.kernel
    for settings in DECODE_CHOICES.values():
        for shared_bytes in SM_SHARED_BYTES:
            yield from decode.attention_of(128, shared_bytes=shared_bytes, choices=settings).kernels()
    for settings in PREFILL_CHOICES.values():
        for kv_dtype in ("bf16", "q8_0"):
            yield from prefill.attention_of(128, kv_dtype, choices=settings).kernels()


def encoder_checks() -> Iterator[Check]:
    """Yield the wide checks of encoders' attention."""
    for dtype, name in ENCODER_DTYPES.items():
        for head_dim in (*PUBLISHED_HEAD_DIMS, *_OTHER_HEAD_DIMS):
            plain = EncoderCase(head_dim, dtype, (1, 17, 128, 129, 600))
            local = EncoderCase(head_dim, dtype, (63, 64, 65, 300), window=head_dim)
            biased = EncoderCase(head_dim, dtype, (1, 40, 200), has_bias=True)
            for kind, case in (("plain", plain), ("local", local), ("biased", biased)):
                yield check_of("encoder", f"{kind}.{name}.{head_dim}", encoder.check_attention, case=case)
        steep = EncoderCase(64, dtype, (150,), is_steep=True)
        yield check_of("encoder", f"steep.{name}", encoder.check_attention, case=steep)


def delta_checks() -> Iterator[Check]:
    """Yield the wide checks of delta rules."""
    for name, dtype in DTYPES.items():
        for key_dim, value_dim in ((64, 48), (128, 128)):
            case = DeltaCase.of(key_dim, value_dim, dtype, tiles=key_dim == 64)
            yield check_of("delta_net", f"{name}.{key_dim}", delta_net.check_delta, case=case)


def wide_head_checks() -> Iterator[Check]:
    """Yield the wide checks of attention of wide heads."""
    for name, dtype in DTYPES.items():
        for kv_dtype in KV_MACRO:
            for head_dim, softcap in ((512, 0.0), (96, 3.0)):
                case = WideCase(head_dim, kv_dtype, dtype, softcap)
                yield check_of("wide", f"{name}.{kv_dtype}.{head_dim}", wide.check_wide, case=case)
                store = StoreCase(HeadShape(3, 1, head_dim), kv_dtype, 16, head_dim)
                yield check_of(
                    "wide", f"store.{name}.{kv_dtype}.{head_dim}", wide.check_wide_store, case=store, dtype=dtype
                )


def _caches() -> Iterator[tuple[str, int]]:
    """Yield (KV dtype, head size) of each attention kernel."""
    for kv_dtype in KV_MACRO:
        yield from ((kv_dtype, head_dim) for head_dim in HEAD_DIMS if kv_dtype != "q8_0" or supports_q8_0(head_dim))


def _decode(
    shared_bytes: int, kv_dtype: str, head_dim: int, group: int, page_size: int, lengths: tuple[int, ...],
    *, repeats: int = 1, window: int = 0, **others: Any,
) -> Check:  # fmt: skip
    def run(launcher: Launcher) -> float:
        attention = decode.attention_of(
            head_dim, kv_dtype, group=group, page_size=page_size, num_sms=132, shared_bytes=shared_bytes,
            window=window, **others,
        )  # fmt: skip
        case = decode.DecodeCase.of(attention, decode.rows_of(*lengths))
        out = case.run(launcher)
        for _ in range(repeats - 1):
            require_same_bits("a repeat", case.run(launcher), out)
        return require_within("relative to the largest of a row", case.error(out), decode.TOLERANCE[out.dtype])

    return Check("decode", _name(kv_dtype, head_dim, group, page_size, window, max(lengths)), run)


def _prefill(
    kv_dtype: str, head_dim: int, group: int, page_size: int, shapes: tuple[tuple[int, int], ...],
    *, repeats: int = 1, window: int = 0, has_wgmma: bool = False, **others: Any,
) -> Check:  # fmt: skip
    def run(launcher: Launcher) -> float:
        attention = prefill.attention_of(
            head_dim, kv_dtype, group=group, page_size=page_size, window=window, has_wgmma=has_wgmma, **others
        )
        step = prefill.prepare(attention, prefill.rows_of(*shapes))
        out = prefill.run(attention, step, launcher)
        for _ in range(repeats - 1):
            require_same_bits("a repeat", prefill.run(attention, step, launcher), out)
        return require_within("of a query", prefill.error_of(attention, step, out), prefill.TOLERANCE[kv_dtype])

    name = _name(kv_dtype, head_dim, group, page_size, window, max(map(sum, shapes)))
    return Check("wgmma" if has_wgmma else "prefill", name, run)


def _name(kv_dtype: str, head_dim: int, group: int, page_size: int, window: int, longest: int) -> str:
    return f"{kv_dtype}.d{head_dim}.g{group}.p{page_size}.{longest}" + (f".w{window}" if window else "")


def _decode_beside_other_rows(launcher: Launcher, kv_dtype: str, shared_bytes: int) -> None:
    row, others = decode.row_of(1100, 7), decode.rows_of(5, 300, 2000)
    alone = decode.DecodeCase.of(decode.attention_of(128, kv_dtype, shared_bytes=shared_bytes), [row]).run(launcher)[0]
    for seed, place, num_sms in ((1, 0, 132), (2, 2, 7), (3, 3, 66)):
        attention = decode.attention_of(128, kv_dtype, num_sms=num_sms, shared_bytes=shared_bytes)
        step = decode.DecodeCase.of(attention, [*others[:place], row, *others[place:]], seed=seed)
        require_same_bits(f"at place {place} of {len(others) + 1}", step.run(launcher)[place], alone)


def _prefill_in_any_chunks(launcher: Launcher, kv_dtype: str, has_wgmma: bool = False) -> None:
    attention, num_tokens = prefill.attention_of(128, kv_dtype, group=4, has_wgmma=has_wgmma), 150

    def run(rows: list[Row], seed: int) -> Tensor:
        return prefill.run(attention, prefill.widened(prefill.prepare(attention, rows, seed=seed)), launcher)

    whole = run([Row(0, num_tokens)], 0)
    for size in (7, 64):
        chunks = [Row(at, min(size, num_tokens - at)) for at in range(0, num_tokens, size)]
        require_same_bits(f"in chunks of {size}", torch.cat([run([row], size) for row in chunks]), whole)
    require_same_bits("token by token", run([Row(at, 1) for at in range(num_tokens)], 1), whole)
