"""The checks of gpu-check's catalogue, on the emulator."""

from __future__ import annotations

import pytest

from tests.cuda_emulator import EmulatedLauncher
from tools.gpu_check.cases.catalogue import Check, invariance_checks, small_checks

LAUNCHER = EmulatedLauncher()


@pytest.mark.parametrize("check", list(small_checks()), ids=lambda check: f"{check.family}.{check.name}")
def test_a_small_check_passes(check: Check) -> None:
    check.run(LAUNCHER)


@pytest.mark.parametrize("check", list(invariance_checks()), ids=lambda check: f"{check.family}.{check.name}")
def test_a_check_of_invariance_passes(check: Check) -> None:
    check.run(LAUNCHER)
