"""Products of many rows in 8 bits, on the emulator and torch's CPU, agree with float64, and rows do not mix."""

from __future__ import annotations

import pytest
import torch

from penstock.backend.passes.cuda.ops import quantized_linear
from penstock.tools.gpu.cases.products.quantized import DTYPES, LinearCase, check_widened
from penstock.tools.gpu.cases.products.rounded import FORMS, MIN_ROUNDED_ROWS, check_rounded, check_rounding, run
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
ROWS = MIN_ROUNDED_ROWS + 3


def entries(launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched from now on."""
    found: list[str] = []
    launch = launcher.launch
    monkeypatch.setattr(launcher, "launch", lambda kernel, *rest: (found.append(kernel.entry), launch(kernel, *rest)))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_products_agree_with_float64(form: str, dtype: torch.dtype) -> None:
    check_rounded(FAST, LinearCase(form, 48, 136, ROWS, dtype, has_bias=True))
    check_rounded(FAST, LinearCase(form, 16, 64, ROWS, dtype, scale=0.5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rows_are_rounded_to_the_nearest_number_in_the_order_of_weights(form: str, dtype: torch.dtype) -> None:
    for inputs in (8, 64, 200):
        check_rounding(FAST, form, dtype, inputs)


def test_outputs_are_cut_to_the_memory_for_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "SCRATCH_BYTES", ROWS * 4 * 40)  # of 80 outputs, 32 at a time
    launcher = EmulatedLauncher()
    launched = entries(launcher, monkeypatch)
    check_rounded(launcher, LinearCase("int8", 80, 72, ROWS, torch.bfloat16, has_bias=True, scale=2.0))
    assert launched == ["round_rows", *["scale_sums"] * 3]


@pytest.mark.parametrize(("form", "order"), [("int8", "random"), ("fp8", "reverse")])
def test_rows_are_rounded_without_races_and_in_bounds(form: str, order: str) -> None:
    launcher = EmulatedLauncher("check", order, 5)  # type: ignore[arg-type]
    check_rounded(launcher, LinearCase(form, 16, 1096, ROWS, torch.bfloat16, has_bias=True))


def test_an_int8_row_has_the_same_bits_in_any_batch_that_is_rounded() -> None:
    case = LinearCase("int8", 32, 200, ROWS + 20, torch.bfloat16, has_bias=True)
    x = case.rows()
    assert torch.equal(run(FAST, case, x)[20:], run(FAST, case, x[20:]))


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        (LinearCase("int8", 32, 64, MIN_ROUNDED_ROWS - 1, torch.bfloat16), (9, 0)),
        (LinearCase("int8", 40, 64, ROWS, torch.bfloat16), (9, 0)),  # the library needs a multiple of 16 outputs
        (LinearCase("fp8", 32, 64, ROWS, torch.bfloat16), (8, 0)),  # it has no such products there
        (LinearCase("fp8", 32, 64, ROWS, torch.bfloat16, scale=2.0), (9, 0)),
        (LinearCase("fp8-128", 32, 128, ROWS, torch.bfloat16), (9, 0)),
        (LinearCase("int4", 32, 64, ROWS, torch.bfloat16), (9, 0)),
    ],
    ids=str,
)
def test_other_products_keep_rows_of_16_bits(
    case: LinearCase, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = EmulatedLauncher()
    launched = entries(launcher, monkeypatch)
    found = run(launcher, case, case.rows(), capability)
    assert launched == ["dequantise_rows"]
    assert not found.isnan().any()
    check_widened(launcher, case)
