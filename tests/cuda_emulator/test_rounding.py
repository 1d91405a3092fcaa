"""The emulator rounds like the C library or, in the mode "device", like a GPU; kernels pass their checks in both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu.cases.catalogue import invariance_checks, small_checks
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.cases.ptx_wrappers import WRAPPERS
from penstock.tools.gpu.cases.sampler import FILTERS, check_distribution, check_filter, check_noise
from penstock.tools.gpu.cases.sampling import check_logprobs
from penstock.tools.gpu.checks import invariance, pass_agreement
from penstock.tools.gpu.checks.invariance import BatchCase, PassSizes
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.random_weights import TINY_FAMILY
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.cuda_emulator import EmulatedLauncher
from tests.cuda_emulator.launcher import Mode
from tests.tools.gpu.device_context import HostClock, NoMemoryCounter, Record

DEVICE = EmulatedLauncher("device")
MODES: tuple[Mode, ...] = ("fast", "device")
# It has 13 significant bits, so its square needs 25, and a float has 24.
ODD = 1 + 2.0**-12


def reckon(mode: Mode, directory: Path, expression: str, *values: float) -> list[float]:
    """Evaluate expression in a kernel for each pair (a, b) of neighbouring values."""
    (directory / "reckon.cu").write_text(
        f"""#include "common/ptx.cuh"
        extern "C" __global__ void reckon(const float* in, float* out) {{
            const float a = in[threadIdx.x], b = in[threadIdx.x + 1];
            out[threadIdx.x] = {expression};
        }}
        """
    )
    out = torch.zeros(len(values) - 1)
    kernel = Kernel("reckon.cu", "reckon", (), len(out))
    EmulatedLauncher(mode, kernels_dir=directory).launch(kernel, (1, 1, 1), torch.tensor(values), out)
    return out.tolist()


def test_the_device_mode_fuses_products_and_sums_except_rounded_ones(tmp_path: Path) -> None:
    rest = 2.0**-24
    assert reckon("fast", tmp_path, "a * b - (1 + 2 * 0x1p-12f)", ODD, ODD) == [0.0]
    assert reckon("device", tmp_path, "a * b - (1 + 2 * 0x1p-12f)", ODD, ODD) == [rest]
    for mode in MODES:
        assert reckon(mode, tmp_path, "__fsub_rn(__fmul_rn(a, b), 1 + 2 * 0x1p-12f)", ODD, ODD) == [0.0]


@pytest.mark.parametrize("mode", MODES)
def test_subnormal_numbers_become_zero(tmp_path: Path, mode: Mode) -> None:
    assert reckon(mode, tmp_path, "a * b", 2.0**-100, 2.0**-27, 2.0**-99) == [0.0, 2.0**-126]
    assert torch.tensor(2.0**-100) * 2.0**-27 > 0, "the caller's rounding mode is restored"


def test_approximations_have_the_errors_of_a_device(tmp_path: Path) -> None:
    values = np.linspace(0.03, 30, 201).astype(np.float32)
    exact = values[:-1].astype(np.float64)
    for expression, expected in (("ex2_approx(a)", np.exp2(exact)), ("rcp_approx(a)", 1 / exact)):
        errors = np.array(reckon("device", tmp_path, expression, *values.tolist())) / expected - 1
        assert 2.0**-24 < errors.max() < 2.0**-21
        assert -(2.0**-21) < errors.min() < -(2.0**-24)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_pass_their_checks_with_device_rounding(wrapper: str) -> None:
    WRAPPERS[wrapper](DEVICE)


@pytest.mark.parametrize("check", list(small_checks()), ids=lambda check: f"{check.family}.{check.name}")
def test_kernels_pass_their_checks_with_device_rounding(check: Check) -> None:
    check.run(DEVICE)


@pytest.mark.parametrize("check", list(invariance_checks()), ids=lambda check: f"{check.family}.{check.name}")
def test_a_row_keeps_its_bits_with_device_rounding(check: Check) -> None:
    """A tile of keys that a row does not see must not change the row, although powers of two are inexact."""
    check.run(DEVICE)


@pytest.mark.parametrize("params", FILTERS[:-1], ids=str)
def test_filters_keep_the_same_tokens_with_device_rounding(params: dict[str, float]) -> None:
    check_filter(DEVICE, params)


def test_draws_are_the_same_with_device_rounding() -> None:
    check_noise(DEVICE)
    check_distribution(DEVICE, {"temperature": 1.5, "top_k": 12})
    check_logprobs(DEVICE, torch.bfloat16, 20_000)


def test_passes_agree_with_the_cpu_pass_with_device_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_agreement, "_ROWS", 2)
    monkeypatch.setattr(pass_agreement, "_SIZES", StepSizes(max_rows=2, max_tokens=80, max_context_tokens=80))
    context = DeviceContext(EmulatedDevice("device"), HostClock(), NoMemoryCounter(), lambda: EmulatedDevice("device"))
    record = Record(tmp_path)
    pass_agreement.check_families(record.results, context, ("qwen3",))
    pass_agreement.check_variations(record.results, context, "qwen3", ("int4",))
    assert {"pass.qwen3.int4", "pass.qwen3.bf16", "pass.qwen3.fp16"} <= set(record.findings())


def test_deterministic_passes_keep_a_rows_bits_with_device_rounding(tmp_path: Path) -> None:
    context = DeviceContext(EmulatedDevice("device"), HostClock(), NoMemoryCounter(), lambda: EmulatedDevice("device"))
    record = Record(tmp_path)
    batch_cases = (BatchCase("tokens", 3, 1, 1, 1), BatchCase("beside_decodes", 4, 3, 7, 1))
    sizes = PassSizes(TINY_FAMILY["qwen2-window"], torch.float32, ("bf16", "q8_0"), batch_cases, new_tokens=3)
    invariance.check_passes(record.results, context, sizes)
    assert len(record.findings()) == 6
