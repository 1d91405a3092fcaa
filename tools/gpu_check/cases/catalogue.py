"""Lists every kernel's checks by name: a wide set, its quick subset, and a small set that touches each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.backend.checkpoint.decoder_config import ClampedGate, Experts
from penstock.backend.passes.decoder.cuda.attention.encoder_attention import DTYPES as ENCODER_DTYPES
from penstock.backend.passes.decoder.cuda.attention.encoder_attention import ENCODER_HEAD_DIMS
from penstock.backend.passes.decoder.cuda.attention.kernel_limits import HEAD_DIMS
from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO
from penstock.backend.passes.decoder.ops import HeadShape, supports_q8_0
from penstock.tools.gpu_check.cases import (
    decode,
    elementwise,
    encoder,
    experts,
    logprobs,
    prefill,
    ptx,
    quantized,
    rounded,
    row_products,
    sampling,
    stored_forms,
)
from penstock.tools.gpu_check.cases.comparing import require, require_same_bits, require_within
from penstock.tools.gpu_check.cases.paged_rows import Row

GROUPS = (1, 2, 4, 7, 8, 16)
PAGE_SIZES_TOKENS = (16, 32, 64)
DTYPES = elementwise.DTYPES


@dataclass(frozen=True)
class Check:
    """A named check. run raises Mismatch, or returns the measured error if there is one."""

    family: str
    name: str
    run: Callable[[Launcher], float | None]
    is_of_8b: bool = True
    """Whether the 8B model runs it: heads of 128 in groups of 4 or none; bf16 activations or a KV dtype's own."""


def caches() -> Iterator[tuple[str, int]]:
    """Yield (KV dtype, head size) of each attention kernel."""
    for kv_dtype in KV_MACRO:
        yield from ((kv_dtype, head_dim) for head_dim in HEAD_DIMS if kv_dtype != "q8_0" or supports_q8_0(head_dim))


def wide_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield all checks. shared_bytes: shared memory of one of the device's multiprocessors."""
    yield from _ptx()
    yield from _elementwise(DTYPES, PAGE_SIZES_TOKENS, (64, 80, 96, 128, 256), (8, 72, 1024, 4104, 16384))
    yield from _experts()
    yield from _quantized()
    yield from _row_products()
    yield from _sampling()
    yield from encoder_checks()
    yield Check("decode", "plan", decode.check_plan)
    for number, (kv_dtype, head_dim) in enumerate(caches()):
        for group in GROUPS:
            page_size = PAGE_SIZES_TOKENS[(number + group) % 3]
            yield _decode(shared_bytes, kv_dtype, head_dim, group, page_size, (1, 31, 77, 300), repeats=3)
            yield _prefill(kv_dtype, head_dim, group, page_size, ((0, 1), (40, 1), (0, 33), (70, 80)), repeats=3)
    for kv_dtype in KV_MACRO:
        for page_size in PAGE_SIZES_TOKENS:
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
            run = partial(check, kv_dtype=kv_dtype, shared_bytes=shared_bytes)
            yield Check("decode", f"{name}.{kv_dtype}", run, is_of_8b=False)
        steep = partial(prefill.check_steep, kv_dtype=kv_dtype)
        yield Check("prefill", f"steep.{kv_dtype}", steep, is_of_8b=False)


def quick_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """The wide checks with shapes and dtypes of the 8B model, with every KV dtype, page size and length."""
    return (check for check in wide_checks(shared_bytes) if check.is_of_8b)


def small_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield small checks that cover each kernel source and KV dtype: under a sanitizer everything is slow."""
    for kv_dtype in KV_MACRO:
        yield _decode(shared_bytes, kv_dtype, 64, 3, 16, (1, 40, 300))
        yield _prefill(kv_dtype, 64, 3, 16, ((70, 1), (0, 20), (60, 9)))
    for dtype in ENCODER_DTYPES:
        local = encoder.EncoderCase(32, dtype, (9, 70), window=20, has_bias=True)
        yield Check("encoder", f"small.{ENCODER_DTYPES[dtype]}", partial(encoder.check_attention, case=local))
    yield _decode(shared_bytes, "bf16", 256, 1, 32, (30,), window=20)
    yield _prefill("bf16", 80, 1, 32, ((64, 20),), window=20)
    yield from _elementwise({"bf16": torch.bfloat16}, (16,), (96,), (72,))
    small = experts.ExpertsCase(Experts(5, 2, 40, normalises=True), 72, 9, torch.bfloat16)
    yield Check("experts", "small", partial(experts.check_experts, case=small))
    for form in quantized.ALL_FORMS:
        case = quantized.LinearCase(form, 40, 256, 11, torch.bfloat16, has_bias=True)
        yield Check("quantised", f"small.{form}", partial(quantized.check_linear, case=case))
    for check in row_products.CHECKS:
        yield Check("rows", f"small.{check.__name__}", partial(check, case=row_products.CASES["small"]))
    for form in rounded.FORMS:
        rounding = partial(rounded.check_rounding, form=form, dtype=torch.bfloat16, inputs=200)
        yield Check("rounded", f"small.{form}", rounding)
    case = quantized.LinearCase("int8", 48, 200, 260, torch.bfloat16, has_bias=True)
    yield Check("rounded", "small.product", partial(rounded.check_rounded, case=case))
    yield Check("sampling", "greedy", partial(sampling.check_greedy, dtype=torch.bfloat16, vocab_size=4097))
    yield Check("sampling", "penalties", partial(sampling.check_penalties, vocab_size=90, num_steps=2))
    every = sampling.FILTERS[-1]
    yield Check("sampling", "filters", partial(sampling.check_filter, params=every, draws=1200))
    yield Check("sampling", "overflow", partial(sampling.check_thresholds, params=every, max_listed=8))
    yield Check("sampling", "logprobs", partial(logprobs.check_logprobs, dtype=torch.float32, vocab_size=4001))
    yield from _sampling_edges()


def invariance_checks(shared_bytes: int = decode.H200_SHARED_BYTES) -> Iterator[Check]:
    """Yield checks that a row's bits do not depend on other rows, slots, pages or chunk sizes."""
    for kv_dtype in KV_MACRO:
        yield Check(
            "decode",
            f"company.{kv_dtype}",
            partial(_decode_beside_other_rows, kv_dtype=kv_dtype, shared_bytes=shared_bytes),
        )
        yield Check("prefill", f"cut.{kv_dtype}", partial(_prefill_in_any_chunks, kv_dtype=kv_dtype))
    for dtype, name in ENCODER_DTYPES.items():
        yield Check("encoder", f"company.{name}", partial(encoder.check_company, dtype=dtype))
    alone = experts.ExpertsCase(Experts(3, 2, 40, normalises=True), 136, 75, torch.bfloat16)
    yield Check("experts", "company", partial(experts.check_rows_alone, case=alone))
    linear = quantized.LinearCase("int4", 40, 384, 75, torch.bfloat16)
    yield Check("quantised", "company", partial(quantized.check_company, case=linear))
    yield Check("sampling", "slot", _sampled_in_any_slot)


def wgmma_checks() -> Iterator[Check]:
    """Yield checks of what compute capability 9.0 alone has, with shapes that are small enough for a sanitizer."""
    for name, run in ptx.HOPPER_WRAPPERS.items():
        yield Check("wgmma", name, run)
    shapes = ((0, 1), (40, 1), (0, 33), (170, 80))
    yield _prefill("bf16", 128, 4, 32, shapes, repeats=3, has_wgmma=True)
    yield _prefill("bf16", 64, 7, 16, shapes, window=70, softcap=3.0, has_wgmma=True)
    yield Check("wgmma", "cut", partial(_prefill_in_any_chunks, kv_dtype="bf16", has_wgmma=True))


def _ptx() -> Iterator[Check]:
    for name, run in ptx.WRAPPERS.items():
        yield Check("ptx", name, run)


def _elementwise(
    dtypes: dict[str, torch.dtype], page_sizes: tuple[int, ...], head_dims: tuple[int, ...], widths: tuple[int, ...]
) -> Iterator[Check]:
    for name, dtype in dtypes.items():
        is_of_8b = dtype == torch.bfloat16
        for hidden in widths:
            run = partial(elementwise.check_norm, dtype=dtype, hidden=hidden)
            yield Check("norm", f"{name}.{hidden}", run, is_of_8b)
            yield Check(
                "norm", f"layer.{name}.{hidden}", partial(elementwise.check_layer_norm, dtype=dtype, hidden=hidden)
            )
            yield Check(
                "norm", f"added.{name}.{hidden}", partial(elementwise.check_added_norm, dtype=dtype, hidden=hidden)
            )
            embedding = partial(elementwise.check_embedding, dtype=dtype, hidden=hidden)
            yield Check("embed", f"{name}.{hidden}", embedding, is_of_8b)
        for gate in ("silu_mul", "gelu_mul"):
            run = partial(elementwise.check_gate, dtype=dtype, name=gate, size=1032)
            yield Check("gate", f"{gate}.{name}", run, is_of_8b)
        yield Check("gate", f"gelu.{name}", partial(elementwise.check_gelu, dtype=dtype, size=1032))
        for heads in (HeadShape(7, 1, 64), HeadShape(32, 8, 128)):
            run = partial(elementwise.check_norm_of_all_heads, dtype=dtype, heads=heads)
            yield Check("norm", f"heads.{name}.{heads.num_heads}", run)
        yield Check("gather", name, partial(elementwise.check_gather, dtype=dtype), is_of_8b)
        for kv_dtype in KV_MACRO:
            for number, head_dim in enumerate(head_dims):
                if kv_dtype == "q8_0" and not supports_q8_0(head_dim):
                    continue
                page_size = page_sizes[number % len(page_sizes)]
                case = partial(elementwise.StoreCase, HeadShape(7, 1, head_dim), kv_dtype, page_size, head_dim)
                run = partial(_store, dtype=dtype, make_case=case)
                name_of_case = f"{name}.{kv_dtype}.{head_dim}"
                yield Check("rope_and_store", name_of_case, run, is_of_8b and head_dim == 128)
    for kv_dtype in ("q8_0", "bf16"):
        yield Check("copy_pages", kv_dtype, partial(elementwise.check_page_copies, kv_dtype=kv_dtype))


def _experts() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        is_of_8b = dtype == torch.bfloat16
        for kind in (Experts(8, 2, 1024, normalises=True), Experts(128, 8, 768, normalises=True)):
            for num_tokens in (1, 200):
                case = experts.ExpertsCase(kind, 2048, num_tokens, dtype)
                name_of_case = f"{name}.{kind.count}.{num_tokens}"
                yield Check("experts", name_of_case, partial(experts.check_experts, case=case), is_of_8b)
        gate = partial(experts.check_shared_gate, dtype=dtype, hidden=2048, width=1408)
        yield Check("experts", f"shared_gate.{name}", gate, is_of_8b)
        gpt_oss = Experts(8, 4, 736, normalises=True, biased=True, clamped_gate=ClampedGate(1.702, 7.0))
        clamped = experts.ExpertsCase(gpt_oss, 1440, 60, dtype)
        yield Check("experts", f"clamped.{name}", partial(experts.check_experts, case=clamped), is_of_8b)
    for count, per_token in ((1, 1), (60, 4), (128, 8), (513, 3)):
        routes = partial(experts.check_routes, num_experts=count, per_token=per_token)
        yield Check("experts", f"routes.{count}", routes)
    yield Check("experts", "groups", partial(experts.check_large_groups, num_tokens=20_000))


def _quantized() -> Iterator[Check]:
    for name, dtype in quantized.DTYPES.items():
        for form in quantized.ALL_FORMS:
            for num_rows in (1, 9, 64, 130):
                case = quantized.LinearCase(form, 2048, 4096, num_rows, dtype, has_bias=num_rows == 9)
                run = partial(quantized.check_linear, case=case)
                yield Check("quantised", f"{name}.{form}.{num_rows}", run, dtype == torch.bfloat16)
            table = quantized.LinearCase(form, 500, 4096, 0, dtype)
            yield Check("quantised", f"table.{name}.{form}", partial(quantized.check_embedding, case=table))
            widened = quantized.LinearCase(form, 2048, 4096, 65, dtype)
            yield Check("quantised", f"widened.{name}.{form}", partial(quantized.check_widened, case=widened))
        for stored in stored_forms.STORED_FORMS:
            kind = Experts(16, 4, 768, normalises=True)
            case_of_experts = experts.ExpertsCase(kind, 2048, 90, dtype, stored=stored)
            run = partial(experts.check_experts, case=case_of_experts)
            yield Check("quantised", f"experts.{stored}.{name}", run)
        for form in rounded.FORMS:
            rounding = partial(rounded.check_rounding, form=form, dtype=dtype, inputs=4104)
            yield Check("rounded", f"{name}.{form}", rounding)


def _row_products() -> Iterator[Check]:
    of_8b = row_products.RowCase(4096, 14336, 5, heads=HeadShape(32, 8, 128), rotary_dim=128)
    for name, case in (row_products.CASES | row_products.STORED | {"wide": row_products.WIDE, "8b": of_8b}).items():
        for check in row_products.CHECKS:
            yield Check("rows", f"{name}.{check.__name__}", partial(check, case=case), case is of_8b)
    for kv_dtype in KV_MACRO:
        run = partial(row_products.check_store, case=row_products.small_case(kv_dtype))
        yield Check("rows", f"store.{kv_dtype}", run)


def encoder_checks() -> Iterator[Check]:
    """Yield the wide checks of encoders' attention."""
    for dtype, name in ENCODER_DTYPES.items():
        for head_dim in ENCODER_HEAD_DIMS:
            plain = encoder.EncoderCase(head_dim, dtype, (1, 17, 128, 129, 600))
            local = encoder.EncoderCase(head_dim, dtype, (63, 64, 65, 300), window=head_dim)
            biased = encoder.EncoderCase(head_dim, dtype, (1, 40, 200), has_bias=True)
            for kind, case in (("plain", plain), ("local", local), ("biased", biased)):
                run = partial(encoder.check_attention, case=case)
                yield Check("encoder", f"{kind}.{name}.{head_dim}", run, is_of_8b=False)
        steep = encoder.EncoderCase(64, dtype, (150,), is_steep=True)
        yield Check("encoder", f"steep.{name}", partial(encoder.check_attention, case=steep), is_of_8b=False)


def _store(launcher: Launcher, dtype: torch.dtype, make_case: Callable[[], elementwise.StoreCase]) -> float:
    elementwise.check_store(launcher, make_case(), dtype, norms=True, centres=True)
    return elementwise.check_store(launcher, make_case(), dtype, norms=True)


def _sampling() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        for vocab_size in (1, 4097, 151_936):
            run = partial(sampling.check_greedy, dtype=dtype, vocab_size=vocab_size)
            yield Check("sampling", f"greedy.{name}.{vocab_size}", run, dtype == torch.bfloat16)
        with_logprobs = partial(logprobs.check_logprobs, dtype=dtype, vocab_size=20_000)
        yield Check("sampling", f"logprobs.{name}", with_logprobs, dtype == torch.bfloat16)
    yield Check("sampling", "penalties", partial(sampling.check_penalties, vocab_size=5000, num_steps=12))
    yield Check("sampling", "noise", sampling.check_noise)
    yield Check("sampling", "rare_noise", sampling.check_rare_noise)
    yield from _sampling_edges()
    yield Check("sampling", "ties", sampling.check_ties)
    for number, params in enumerate(sampling.FILTERS):
        for name, dtype in DTYPES.items():
            kept = partial(sampling.check_filter, params=params, dtype=dtype)
            yield Check("sampling", f"filter.{name}.{number}", kept, dtype == torch.bfloat16)
            thresholds = partial(sampling.check_thresholds, params=params, dtype=dtype)
            yield Check("sampling", f"thresholds.{name}.{number}", thresholds, dtype == torch.bfloat16)
    some: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.5, "top_k": 12}, {"min_p": 0.05, "top_p": 0.9})
    for number, params in enumerate(some):
        run = partial(sampling.check_distribution, params=params, num_steps=20)
        yield Check("sampling", f"chi_square.{number}", run)


def _sampling_edges() -> Iterator[Check]:
    yield Check("sampling", "biases", sampling.check_biases)
    yield Check("sampling", "counts", sampling.check_counts)
    yield Check("sampling", "fallback", sampling.check_fallback)
    yield Check("sampling", "misjudged", sampling.check_misjudged_rows)


def _decode(
    shared_bytes: int,
    kv_dtype: str,
    head_dim: int,
    group: int,
    page_size: int,
    lengths: tuple[int, ...],
    *,
    window: int = 0,
    softcap: float = 0.0,
    repeats: int = 1,
) -> Check:
    def run(launcher: Launcher) -> float:
        attention = decode.attention_of(
            head_dim,
            kv_dtype,
            group=group,
            page_size=page_size,
            num_sms=132,
            shared_bytes=shared_bytes,
            window=window,
            softcap=softcap,
        )
        case = decode.DecodeCase.of(attention, decode.rows_of(*lengths))
        out = case.run(launcher)
        for _ in range(repeats - 1):
            require_same_bits("a repeat", case.run(launcher), out)
        return require_within("relative to the largest of a row", case.error(out), decode.TOLERANCE[out.dtype])

    name = _name(kv_dtype, head_dim, group, page_size, window, max(lengths))
    return Check("decode", name, run, (head_dim, group) == (128, 4))


def _prefill(
    kv_dtype: str,
    head_dim: int,
    group: int,
    page_size: int,
    shapes: tuple[tuple[int, int], ...],
    *,
    window: int = 0,
    softcap: float = 0.0,
    repeats: int = 1,
    has_wgmma: bool = False,
) -> Check:
    def run(launcher: Launcher) -> float:
        attention = prefill.attention_of(
            head_dim, kv_dtype, group=group, page_size=page_size, window=window, softcap=softcap, has_wgmma=has_wgmma
        )
        step = prefill.prepare(attention, prefill.rows_of(*shapes))
        out = prefill.run(attention, step, launcher)
        for _ in range(repeats - 1):
            require_same_bits("a repeat", prefill.run(attention, step, launcher), out)
        return require_within("of a query", prefill.error_of(attention, step, out), prefill.TOLERANCE[kv_dtype])

    name = _name(kv_dtype, head_dim, group, page_size, window, max(map(sum, shapes)))
    return Check("wgmma" if has_wgmma else "prefill", name, run, (head_dim, group) == (128, 4))


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
    whole = prefill.run(attention, prefill.prepare(attention, [Row(0, num_tokens)]), launcher)
    for size in (7, 64):
        chunks = [Row(at, min(size, num_tokens - at)) for at in range(0, num_tokens, size)]
        parts = [prefill.run(attention, prefill.prepare(attention, [row], seed=size), launcher) for row in chunks]
        require_same_bits(f"in chunks of {size}", torch.cat(parts), whole)
    by_token = prefill.prepare(attention, [Row(at, 1) for at in range(num_tokens)], seed=1)
    require_same_bits("token by token", prefill.run(attention, by_token, launcher), whole)


def _sampled_in_any_slot(launcher: Launcher) -> None:
    vocab_size = 4200
    mine = sampling.random_logits(vocab_size, seed=1)
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 200, "seed": 77, "repetition_penalty": 1.3}
    alone, crowded = (sampling.SamplingDevice(launcher, vocab_size, 8) for _ in range(2))
    alone.take(sampling.slot_init(0, [4, 5], **params))
    crowded.take(sampling.slot_init(5, [4, 5], **params))
    crowded.take(*(sampling.slot_init(slot, seed=slot, temperature=slot / 2, top_k=slot) for slot in (1, 2, 3)))
    for position in range(2, 6):
        expected = alone.sample(mine[None], [0], position)
        logits = sampling.random_logits(4, vocab_size, seed=position)
        logits[position % 4] = mine
        slots = [1, 2, 3]
        slots.insert(position % 4, 5)
        found = crowded.sample(logits, slots, position)[position % 4 : position % 4 + 1]
        require(f"position {position} gives {found}, alone {expected}", found == expected)
