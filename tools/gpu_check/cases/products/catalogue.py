"""Lists the checks of products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from penstock.backend.checkpoint.decoder_config import ClampedGate, Experts
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO
from penstock.backend.passes.decoder.ops import HeadShape
from penstock.tools.gpu_check.cases.check import Check
from penstock.tools.gpu_check.cases.elementwise.operations import DTYPES
from penstock.tools.gpu_check.cases.products import experts, quantized, rounded, row_products, stored_forms


def wide_checks() -> Iterator[Check]:
    yield from _experts()
    yield from _quantized()
    yield from _row_products()


def small_checks() -> Iterator[Check]:
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


def invariance_checks() -> Iterator[Check]:
    alone = experts.ExpertsCase(Experts(3, 2, 40, normalises=True), 136, 75, torch.bfloat16)
    yield Check("experts", "company", partial(experts.check_rows_alone, case=alone))
    linear = quantized.LinearCase("int4", 40, 384, 75, torch.bfloat16)
    yield Check("quantised", "company", partial(quantized.check_company, case=linear))


def _experts() -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        is_of_8b = dtype == torch.bfloat16
        for kind in (Experts(8, 2, 1024, normalises=True), Experts(128, 8, 256, normalises=True)):
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
            kind = Experts(16, 4, 384, normalises=True)
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
