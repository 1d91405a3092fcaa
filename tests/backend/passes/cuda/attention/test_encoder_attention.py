"""Encoder attention on the emulator equals attention in float64; a planted bug shows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.backend.passes.cuda.attention.encoder_attention import EncoderAttention
from penstock.backend.passes.cuda.device.launcher import KERNELS_DIR, Launcher
from penstock.tools.gpu.cases.attention.catalogue import encoder_checks
from penstock.tools.gpu.cases.attention.encoder import EncoderCase, check_attention
from penstock.tools.gpu.cases.check import Check, Mismatch
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
CHECKED = (EmulatedLauncher("check"), EmulatedLauncher("check", "random", seed=5))
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("check", list(encoder_checks()), ids=lambda check: check.name)
def test_attention_equals_float64(check: Check) -> None:
    check.run(FAST)


@pytest.mark.parametrize("launcher", CHECKED, ids=["forward", "random"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("head_dim", [32, 72, 128])
def test_attention_has_no_races_and_stays_in_bounds(head_dim: int, dtype: torch.dtype, launcher: Launcher) -> None:
    """The checking mode requires accesses within tensors, ordered by barriers, and to written memory."""
    check_attention(launcher, EncoderCase(head_dim, dtype, (1, 70, 20), window=9, has_bias=True))


def test_a_window_that_ends_one_token_early_is_found(tmp_path: Path) -> None:
    source = (KERNELS_DIR / "prefill/encoder_attention.cu").read_text()
    assert source.count("distance > side") == 1
    (tmp_path / "prefill").mkdir()
    (tmp_path / "prefill/encoder_attention.cu").write_text(source.replace("distance > side", "distance >= side"))
    check = partial(check_attention, case=EncoderCase(32, BF16, (40,), window=8))
    check(FAST)
    with pytest.raises(Mismatch, match="relative error of a token"):
        check(EmulatedLauncher(kernels_dir=tmp_path))


def test_unsupported_shapes_are_refused() -> None:
    for head_dim in (0, 26, 136):
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}; it must be a multiple of 8, at most 128"):
            EncoderAttention(2, head_dim, BF16, 1.0)
    with pytest.raises(ValueError, match=r"dtype is torch.float16; it must be one of fp32, bf16"):
        EncoderAttention(2, 64, torch.float16, 1.0)
    with pytest.raises(ValueError, match="scale is 0"):
        EncoderAttention(2, 64, BF16, 0.0)
