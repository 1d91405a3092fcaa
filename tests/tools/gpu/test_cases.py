"""The comparisons of cases, and the checks of invariance and of settings on the emulator.

The other cases run in tests/backend/passes/cuda.
"""

from __future__ import annotations

import pytest
import torch

from penstock.tools.gpu.cases.attention.catalogue import choice_checks
from penstock.tools.gpu.cases.catalogue import invariance_checks, small_checks, wide_checks
from penstock.tools.gpu.cases.check import Check, Mismatch, require_close, require_same_bits, require_within
from tests.cuda_emulator import EmulatedLauncher

LAUNCHER = EmulatedLauncher()


@pytest.mark.parametrize("check", list(invariance_checks()), ids=lambda check: f"{check.family}.{check.name}")
def test_invariance_check_passes(check: Check) -> None:
    check.run(LAUNCHER)


@pytest.mark.parametrize("check", list(choice_checks()), ids=lambda check: check.name)
def test_results_are_right_with_every_setting_that_may_be_chosen(check: Check) -> None:
    check.run(LAUNCHER)


def test_checks_have_distinct_names() -> None:
    for checks in (list(small_checks()), list(wide_checks())):
        assert len({(check.family, check.name) for check in checks}) == len(checks)


def test_require_close_reports_the_error_of_distant_numbers() -> None:
    nan, inf = torch.nan, torch.inf
    assert require_close("x", torch.tensor([1.0, nan, inf]), torch.tensor([1.001, nan, inf]), 0.01, 0.0) < 0.2
    for found in ([1.02, nan, inf], [1.0, 1.0, inf], [1.0, nan, nan], [nan, nan, inf]):
        with pytest.raises(Mismatch, match=r"^x, as a share of the tolerance: an error of"):
            require_close("x", torch.tensor(found), torch.tensor([1.0, nan, inf]), 0.01, 0.0)
    with pytest.raises(Mismatch, match=r"shape \(2,\), expected \(3,\)"):
        require_close("x", torch.zeros(2), torch.zeros(3), 1, 1)


def test_require_same_bits_counts_differing_bytes() -> None:
    require_same_bits("x", torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, 0.0]))
    with pytest.raises(Mismatch, match="x: 1 of 8 bytes differ"):
        require_same_bits("x", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))


def test_require_within_refuses_nan_and_larger_errors() -> None:
    assert require_within("x", 0.5, 1.0) == 0.5
    for error in (1.5, torch.nan):
        with pytest.raises(Mismatch, match="at most 1 is allowed"):
            require_within("x", error, 1.0)
