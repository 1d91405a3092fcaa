"""The emulation of ptx.cuh: wrapper by wrapper, by the same checks that a GPU has to pass."""

from __future__ import annotations

import pytest

from tests.cuda_emulator import EmulatedLauncher
from tools.gpu_check.cases.ptx import WRAPPERS


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_does_what_torch_and_the_manual_say(wrapper: str) -> None:
    WRAPPERS[wrapper](EmulatedLauncher())
