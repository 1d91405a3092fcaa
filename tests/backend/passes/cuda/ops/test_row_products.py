"""Products of few rows on the emulator agree with float64, in any order of threads and without races."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from penstock.backend.passes.cuda.ops.row_products import MAX_ROWS
from penstock.tools.gpu.cases.products.row_products import (
    CASES,
    CHECKS,
    CLAIMED,
    STORED,
    WIDE,
    RowCase,
    check_add,
    check_claims,
    check_company,
    check_gate,
    check_store,
    small_case,
)
from tests.cuda_emulator import EmulatedLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.passes.cuda.device.launcher import Launcher
    from tests.cuda_emulator.launcher import Order

FAST = EmulatedLauncher()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_agree_with_float64(case: RowCase, check: Callable[[Launcher, RowCase], float]) -> None:
    check(FAST, case)


@pytest.mark.parametrize("case", STORED.values(), ids=STORED)
def test_products_with_weights_of_8_bits_agree_with_float64(case: RowCase) -> None:
    for check in CHECKS:
        check(FAST, case)
    check_company(FAST, replace(case, num_rows=10))


@pytest.mark.parametrize("case", CLAIMED.values(), ids=CLAIMED)
def test_blocks_that_claim_tiles_give_the_same_bits(case: RowCase) -> None:
    check_claims(FAST, case)
    check_gate(FAST, replace(case, claiming_blocks=3))
    check_claims(EmulatedLauncher("check", "random", 3), replace(case, width=56))


def test_a_wide_output_is_cut_into_larger_tiles() -> None:
    check_add(FAST, WIDE)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_heads_are_stored_with_the_bits_of_separate_kernels(kv_dtype: str) -> None:
    for ropes_by_token in (False, True):
        check_store(FAST, replace(small_case(kv_dtype), ropes_by_token=ropes_by_token))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    check_company(FAST, replace(CASES["full"], num_rows=19))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_products_have_no_races_and_use_nothing_before_their_wait(order: Order) -> None:
    launcher = EmulatedLauncher("check", order, 3)
    for check in CHECKS:
        check(launcher, CASES["small"])
    check_gate(launcher, replace(STORED["fp8-128"], num_rows=2))
    check_store(launcher, replace(CASES["full"], num_rows=MAX_ROWS if order == "reverse" else 9))
