"""Each wrapper of ptx.cuh compiles, and its emulation passes the same checks as a GPU."""

from __future__ import annotations

import re

import pytest

from penstock.backend.passes.cuda.device import nvrtc
from penstock.tools.gpu.cases.ptx_wrappers import SOURCE, WRAPPERS, wrapper_kernel
from tests.cuda_emulator import EmulatedLauncher


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_agrees_with_torch_and_the_manual(wrapper: str) -> None:
    WRAPPERS[wrapper](EmulatedLauncher())


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_the_assembler_accepts_every_wrapper(arch: str, half: int) -> None:
    """Compiles all kernels of the source together, as a check on a GPU does."""
    text = SOURCE.read_text()
    entries = re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", text)
    assert len(entries) == text.count("__global__")
    kernels = [wrapper_kernel(entry, half=half) for entry in entries]
    assert [report.kernel for report in nvrtc.compile_kernels(kernels, arch)] == kernels
