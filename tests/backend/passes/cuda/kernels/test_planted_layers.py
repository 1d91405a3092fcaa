"""The cases' comparisons with float64 find a bug in the kernels of delta rules and of wide heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.tools.gpu.cases.attention import delta_net, wide
from penstock.tools.gpu.cases.attention.delta_net import DeltaCase
from penstock.tools.gpu.cases.attention.wide import WideCase
from tests.backend.passes.cuda.kernels import test_planted_bugs as planted_bugs
from tests.backend.passes.cuda.kernels.test_planted_bugs import Planted
from tests.cuda_emulator.planting import Bug

DELTA_RULE = (
    Bug("delta_net.cu", "row.is_new ? 0.0f : kept[(place + net.width - 1) * net.channels() + channel]", "0.0f"),
    Bug("delta_net.cu", "row.count - (net.width - 1) + j", "row.count - net.width + j"),
    Bug("delta_net.cu", "token - row.first + j + 1 - width", "token - row.first + j + 2 - width"),
    Bug("delta_net.cu", "head / (value_heads / key_heads)", "head % key_heads"),
    Bug("delta_net.cu", "x > 20.0f ? x : log1pf(expf(x))", "log1pf(expf(x + x))"),
    Bug("delta_net.cu", "(wanted - known) * strength", "wanted * strength"),
    Bug("delta_net.cu", "fmaf(agreement, update, read)", "read"),
    Bug(
        "delta_net.cu",
        "reduce_block(x * x, one_per_warp, Sum{}) / float(value_dim)",
        "reduce_block(x * x, one_per_warp, Sum{}) / 64.0f",
    ),
)
WIDE = (
    Bug("wide_attention.cu", "first + t <= position ? x : -infinity()", "x"),
    Bug("wide_attention.cu", "expf(peak - top)", "1.0f"),
    Bug("wide_attention.cu", "head / (gridDim.y / num_kv_heads)", "head % num_kv_heads"),
    Bug("wide_attention.cu", "expf(peaks[w] - peak)", "1.0f"),
)
_DELTA_CASE, _WIDE_CASE = DeltaCase.of(64, 16, torch.float32), WideCase(96, "fp32", torch.float32)
PLANTED = {
    "delta rules": Planted(("delta_net.cu",), partial(delta_net.check_delta, case=_DELTA_CASE), DELTA_RULE),
    "wide heads": Planted(("wide_attention.cu",), partial(wide.check_wide, case=_WIDE_CASE), WIDE),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_each_planted_bug_is_found(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_bugs.test_each_planted_bug_is_found(planted, tmp_path, monkeypatch)
