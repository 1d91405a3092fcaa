"""Lists the checks of products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, Experts
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.cases.check import Check, check_of
from penstock.tools.gpu.cases.elementwise import DTYPES
from penstock.tools.gpu.cases.products import adapters, experts, quantized, rounded, row_products, stored_forms
from penstock.tools.gpu.cases.products.experts import ExpertsCase
from penstock.tools.gpu.cases.products.quantized import LinearCase

_BF16 = torch.bfloat16


def wide_checks() -> Iterator[Check]:
    yield from _experts()
    yield from _quantized()
    yield from _row_products()
    for name, adapted in adapters.cases().items():
        yield check_of("adapters", name, adapters.check_adapters, case=adapted)


def small_checks() -> Iterator[Check]:
    for name, adapted in adapters.cases().items():
        if not name.startswith("wide"):
            yield check_of("adapters", f"small.{name}", adapters.check_adapters, case=adapted)
    small = ExpertsCase(Experts(5, 2, 40, normalises=True), 72, 9, _BF16)
    yield check_of("experts", "small", experts.check_experts, case=small)
    for form in quantized.ALL_FORMS:
        case = LinearCase(form, 40, 256, 11, _BF16, has_bias=True)
        yield check_of("quantised", f"small.{form}", quantized.check_linear, case=case)
    for check in row_products.CHECKS:
        yield check_of("rows", f"small.{check.__name__}", check, case=row_products.CASES["small"])
    claimed = row_products.RowCase(1288, 24, 1)
    yield check_of("rows", "small.claims", row_products.check_claims, case=claimed)
    for form in rounded.FORMS:
        yield check_of("rounded", f"small.{form}", rounded.check_rounding, form=form, dtype=_BF16, inputs=200)
    case = LinearCase("int8", 48, 200, 260, _BF16, has_bias=True)
    yield check_of("rounded", "small.product", rounded.check_rounded, case=case)


def invariance_checks() -> Iterator[Check]:
    alone = ExpertsCase(Experts(3, 2, 40, normalises=True), 136, 75, _BF16)
    yield check_of("experts", "company", experts.check_rows_alone, case=alone)
    yield check_of("adapters", "company", adapters.check_company, case=adapters.cases()["wide.bf16"])
    yield check_of("quantised", "company", quantized.check_company, case=LinearCase("int4", 40, 384, 75, _BF16))


def _experts() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        for kind in (Experts(8, 2, 1024, normalises=True), Experts(128, 8, 256, normalises=True)):
            for num_tokens in (1, 200):
                case = ExpertsCase(kind, 2048, num_tokens, dtype)
                yield check_of("experts", f"{name}.{kind.count}.{num_tokens}", experts.check_experts, case=case)
        gate = experts.check_shared_gate
        yield check_of("experts", f"shared_gate.{name}", gate, dtype=dtype, hidden=2048, width=1408)
        gpt_oss = Experts(8, 4, 736, normalises=True, biased=True, clamped_gate=ClampedGate(1.702, 7.0))
        clamped = ExpertsCase(gpt_oss, 1440, 60, dtype)
        yield check_of("experts", f"clamped.{name}", experts.check_experts, case=clamped)
    for count, per_token in ((1, 1), (60, 4), (128, 8), (513, 3)):
        yield check_of("experts", f"routes.{count}", experts.check_routes, num_experts=count, per_token=per_token)
    yield check_of("experts", "groups", experts.check_large_groups, num_tokens=20_000)


def _quantized() -> Iterator[Check]:
    for name, dtype in quantized.DTYPES.items():
        for form in quantized.ALL_FORMS:
            for num_rows in (1, 9, 64, 130):
                case = LinearCase(form, 2048, 4096, num_rows, dtype, has_bias=num_rows == 9)
                yield check_of("quantised", f"{name}.{form}.{num_rows}", quantized.check_linear, case=case)
            table = LinearCase(form, 500, 4096, 0, dtype)
            yield check_of("quantised", f"table.{name}.{form}", quantized.check_embedding, case=table)
            widened = LinearCase(form, 2048, 4096, 65, dtype)
            yield check_of("quantised", f"widened.{name}.{form}", quantized.check_widened, case=widened)
        for stored in stored_forms.STORED_FORMS:
            of_experts = ExpertsCase(Experts(16, 4, 384, normalises=True), 2048, 90, dtype, stored=stored)
            yield check_of("quantised", f"experts.{stored}.{name}", experts.check_experts, case=of_experts)
        for form in rounded.FORMS:
            yield check_of("rounded", f"{name}.{form}", rounded.check_rounding, form=form, dtype=dtype, inputs=4104)


def _row_products() -> Iterator[Check]:
    of_8b = row_products.RowCase(4096, 14336, 5, heads=HeadShape(32, 8, 128), rotary_dim=128)
    for name, case in (row_products.CASES | row_products.STORED | {"wide": row_products.WIDE, "8b": of_8b}).items():
        for check in row_products.CHECKS:
            yield check_of("rows", f"{name}.{check.__name__}", check, case=case)
    claimed = row_products.CLAIMED | {"8b": replace(of_8b, num_rows=4)}
    for name, case in claimed.items():
        yield check_of("rows", f"claims.{name}", row_products.check_claims, case=case)
    for kv_dtype in KV_MACRO:
        yield check_of("rows", f"store.{kv_dtype}", row_products.check_store, case=row_products.small_case(kv_dtype))
