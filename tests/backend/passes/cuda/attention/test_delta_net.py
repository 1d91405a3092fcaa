"""Gated delta rules and attention of wide heads on the emulator agree with float64, in any order of threads."""

from __future__ import annotations

import pytest
import torch

from penstock.backend.checkpoint.config.decoder_config import DeltaNet
from penstock.backend.passes.cuda.attention.delta_net import unsupported_reason
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.cases.attention import catalogue, delta_net, wide
from penstock.tools.gpu.cases.attention.delta_net import DeltaCase
from penstock.tools.gpu.cases.attention.wide import WideCase
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.cases.elementwise import StoreCase, check_gates
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
CHECKED = EmulatedLauncher("check", "random", 3)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "check",
    [*catalogue.delta_checks(), *catalogue.wide_head_checks()],
    ids=lambda check: f"{check.family}.{check.name}",
)
def test_results_agree_with_float64(check: Check) -> None:
    check.run(FAST)


def test_delta_rules_have_no_races_and_the_same_bits_in_any_chunks() -> None:
    delta_net.check_delta(CHECKED, DeltaCase.of(64, 16, torch.float32))
    delta_net.check_delta_cuts(FAST, DeltaCase.of(128, 64, BF16))


def test_attention_of_wide_heads_has_no_races_and_the_same_bits_in_any_chunks() -> None:
    wide.check_wide(CHECKED, WideCase(96, "q8_0", BF16))
    wide.check_wide_store(CHECKED, StoreCase(HeadShape(3, 1, 64), "q8_0", 16, 32), BF16)
    wide.check_wide_cuts(FAST, WideCase(256, "bf16", BF16))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_gates_beside_results_agree_with_float64(dtype: torch.dtype) -> None:
    check_gates(FAST, dtype, 72)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "reason"),
    [(128, 128, None), (96, 128, "keys have 96 values"), (64, 136, "values have 136")],
)
def test_heads_without_kernels_are_named(key_dim: int, value_dim: int, reason: str | None) -> None:
    found = unsupported_reason(DeltaNet((True,), 2, 4, key_dim, value_dim, 4))
    assert found is None if reason is None else reason in str(found)
