"""The wrappers of ptx.cuh, one by one: their emulation by the checks that a GPU has to pass, and that they compile."""

from __future__ import annotations

import re

import pytest

from penstock.backend.passes.decoder.cuda.device import nvrtc
from penstock.tools.gpu_check.cases.ptx import SOURCE, WRAPPERS, wrapper_kernel
from tests.cuda_emulator import EmulatedLauncher


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_does_what_torch_and_the_manual_say(wrapper: str) -> None:
    WRAPPERS[wrapper](EmulatedLauncher())


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_the_instructions_of_the_wrappers_are_ones_that_the_assembler_knows(arch: str, half: int) -> None:
    """Of all kernels in the source, for they are compiled together: what a GPU's check would launch."""
    text = SOURCE.read_text()
    entries = re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", text)
    assert len(entries) == text.count("__global__")
    kernels = [wrapper_kernel(entry, half=half) for entry in entries]
    assert [report.kernel for report in nvrtc.compile_kernels(kernels, arch)] == kernels
