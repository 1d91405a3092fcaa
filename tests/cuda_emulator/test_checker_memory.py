"""The checker's records of a launch are reused by the next one, so its memory has the size of the largest launch."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.backend.passes.cuda.device.launcher import Kernel
from tests.cuda_emulator import EmulatedLauncher

NUM_LAUNCHES, THREADS, BLOCKS = 24, 256, 256
LAUNCH_BYTES = 4 * THREADS * BLOCKS
RECORD_BYTES = 64
"""The checker's records of one byte."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_launches_on_new_tensors_need_no_more_memory_than_one(tmp_path: Path) -> None:
    (tmp_path / "fill.cu").write_text(
        'extern "C" __global__ void fill(float* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = 1; }'
    )
    launcher, kernel = EmulatedLauncher("check", kernels_dir=tmp_path), Kernel("fill.cu", "fill", (), THREADS)
    tensors = [torch.zeros(THREADS * BLOCKS) for _ in range(NUM_LAUNCHES)]
    launcher.launch(kernel, (BLOCKS, 1, 1), tensors[0])
    before_bytes = resident_bytes()
    for tensor in tensors[1:]:
        launcher.launch(kernel, (BLOCKS, 1, 1), tensor)
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    assert resident_bytes() - before_bytes < NUM_LAUNCHES // 4 * LAUNCH_BYTES * RECORD_BYTES
