"""The kernels of mixtures of experts on the emulator agree with float64, in any order of threads and without races."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, Experts
from penstock.backend.passes.cuda.device.launcher import Argument, Grid, Kernel
from penstock.backend.passes.cuda.ops.expert_ops import unsupported_reason
from penstock.tools.gpu.cases.elementwise import DTYPES
from penstock.tools.gpu.cases.products.experts import (
    ExpertsCase,
    check_experts,
    check_large_groups,
    check_routes,
    check_rows_alone,
    check_shared_gate,
)
from penstock.tools.gpu.cases.products.stored_forms import STORED_FORMS
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
GPT_OSS = Experts(5, 2, 40, normalises=True, biased=True, clamped_gate=ClampedGate(1.7, 0.5))
CHECKERS = {order: EmulatedLauncher("check", order, 3) for order in ("forward", "reverse", "random")}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("experts", "hidden", "num_tokens"),
    [
        (Experts(4, 2, 136, normalises=True), 72, 150),  # groups of more than one tile
        (Experts(40, 3, 24, normalises=False), 264, 9),
        (Experts(1, 1, 8, normalises=False), 8, 1),
        (GPT_OSS, 72, 90),
    ],
    ids=str,
)
def test_experts_agree_with_float64(experts: Experts, hidden: int, num_tokens: int, dtype: torch.dtype) -> None:
    check_experts(FAST, ExpertsCase(experts, hidden, num_tokens, dtype))


class WithoutExpertProducts(EmulatedLauncher):
    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        assert kernel.entry != "multiply_experts"
        super().launch(kernel, grid, *arguments)


@pytest.mark.parametrize("experts", [Experts(40, 3, 24, normalises=False), GPT_OSS], ids=str)
def test_grouped_products_of_many_rows_agree_with_float64(experts: Experts) -> None:
    """Some of the 40 experts have no rows."""
    case = ExpertsCase(experts, 264, 9, torch.bfloat16, grouped_rows=9)
    check_experts(WithoutExpertProducts(), case)
    with pytest.raises(AssertionError, match="multiply_experts"):
        check_experts(WithoutExpertProducts(), replace(case, num_tokens=8))


@pytest.mark.parametrize("stored", STORED_FORMS)
def test_quantised_experts_agree_with_float64(stored: str) -> None:
    case = ExpertsCase(Experts(4, 2, 96, normalises=True), 160, 90, torch.bfloat16, stored=stored)
    check_experts(FAST, case)
    check_rows_alone(FAST, case)


@pytest.mark.parametrize("order", CHECKERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_experts_have_no_races_and_stay_in_bounds(order: str, dtype: torch.dtype) -> None:
    check_experts(CHECKERS[order], ExpertsCase(Experts(5, 2, 40, normalises=True), 72, 11, dtype))
    check_experts(CHECKERS[order], ExpertsCase(GPT_OSS, 72, 3, dtype))
    check_shared_gate(CHECKERS[order], dtype, 1032, 40)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    check_rows_alone(FAST, ExpertsCase(Experts(3, 2, 40, normalises=True), 136, 75, dtype))


@pytest.mark.parametrize(("num_experts", "per_token"), [(1, 1), (8, 2), (9, 9), (128, 8), (513, 3)])
def test_routes_are_the_likeliest_experts(num_experts: int, per_token: int) -> None:
    check_routes(FAST, num_experts, per_token)


def test_routes_have_no_races_and_stay_in_bounds() -> None:
    check_routes(CHECKERS["random"], 34, 3)


def test_many_pairs_are_grouped_by_expert() -> None:
    check_large_groups(FAST, 700)
    check_large_groups(CHECKERS["reverse"], 30)


def test_widths_that_are_no_multiple_of_8_are_refused() -> None:
    assert unsupported_reason(Experts(4, 2, 24, normalises=True, shared_width=16)) is None
    reason = unsupported_reason(Experts(4, 2, 24, normalises=True, shared_width=12))
    assert reason == "the width of the shared expert is 12; it must be a multiple of 8"


@pytest.mark.parametrize("change", [{"clamped_gate": None}, {"biased": False}], ids=str)
def test_biases_without_a_clamped_gate_and_the_reverse_are_refused(change: dict[str, Any]) -> None:
    """No kernel adds a bias before another activation, and none clamps without one."""
    case = ExpertsCase(replace(GPT_OSS, **change), 72, 3, torch.bfloat16)
    with pytest.raises(ValueError, match="its experts have biases or clamped gates, and not both"):
        check_experts(FAST, case)
