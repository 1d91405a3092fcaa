"""Products with weights of 8 and 4 bits on the emulator agree with float64, in any order of threads, without races."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.backend.passes.cuda.ops import quantized_linear
from penstock.backend.passes.cuda.ops.device_weights import DeviceWeights
from penstock.backend.passes.cuda.ops.matmul import BlockedMatmul, CudaLinear, WholeMatmul
from penstock.backend.passes.cuda.ops.packed_weights import packed_bytes
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.tools.gpu.cases.products.quantized import (
    ALL_FORMS,
    DTYPES,
    FORMS,
    LARGE_BLOCKS,
    LinearCase,
    check_company,
    check_embedding,
    check_linear,
    check_widened,
    random_weight,
)
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
FORMS_AND_TYPES = [(form, name) for form in FORMS for name in DTYPES]


@pytest.mark.parametrize(("form", "name"), FORMS_AND_TYPES)
def test_products_agree_with_float64(form: str, name: str) -> None:
    for outputs, inputs, num_rows in ((40, 384, 1), (33, 1024, 70), (8, 128, 9)):
        case = LinearCase(form, outputs, inputs, num_rows, DTYPES[name], has_bias=num_rows > 1, scale=0.5)
        check_linear(FAST, case)


@pytest.mark.parametrize("form", LARGE_BLOCKS)
def test_blocks_of_several_groups_agree_with_float64(form: str) -> None:
    case = LinearCase(form, 40, 768, 9, torch.bfloat16, has_bias=True)
    check_linear(FAST, case)
    check_embedding(FAST, case)
    check_linear(EmulatedLauncher("check", "random", 3), replace(case, outputs=8, num_rows=2))
    check_widened(FAST, LinearCase(form, 40, 256, 65, torch.float16))


@pytest.mark.parametrize("inputs", [32, 96, 160])
def test_inputs_need_not_fill_the_last_chunk(inputs: int) -> None:
    for form in ("int8", "int4", "mxfp4", "fp8-128", "q4_1", "q8_0"):
        check_linear(FAST, LinearCase(form, 24, inputs, 5, torch.bfloat16))
    check_linear(FAST, LinearCase("int8", 24, inputs - 8, 5, torch.bfloat16))


@pytest.mark.parametrize(("form", "name"), FORMS_AND_TYPES)
def test_more_rows_are_multiplied_by_the_library(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "SCRATCH_BYTES", 2 * 32 * 256)  # of 72 outputs, 32 at a time
    launcher = EmulatedLauncher()
    check_widened(launcher, LinearCase(form, 72, 256, 65, DTYPES[name], has_bias=True, scale=2.0))
    assert launcher.num_launches == 3
    check_linear(launcher, LinearCase(form, 72, 256, 64, DTYPES[name]), WholeMatmul(64))
    assert launcher.num_launches == 4, "our kernel for 64 rows"


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    for form in FORMS:
        check_company(FAST, LinearCase(form, 40, 384, 130, torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_table_is_embedded(form: str) -> None:
    check_embedding(FAST, LinearCase(form, 40, 384, 0, torch.bfloat16))


@pytest.mark.parametrize(
    ("form", "order"), [("int8", "random"), ("int4", "forward"), ("mxfp4", "random"), ("fp8-128", "reverse")]
)
def test_products_have_no_races_and_stay_in_bounds(form: str, order: str) -> None:
    launcher = EmulatedLauncher("check", order, 5)  # type: ignore[arg-type]
    case = LinearCase(form, 40, 288, 11, torch.bfloat16, has_bias=True)
    check_linear(launcher, case)
    check_embedding(launcher, case)
    check_widened(launcher, LinearCase(form, 24, 96, 65, torch.bfloat16))


@pytest.mark.parametrize("matmul", [WholeMatmul(), BlockedMatmul()])
@pytest.mark.parametrize(
    ("form", "inputs"),
    [
        ("int8", 200),
        ("int4", 352),
        ("int4-128", 384),
        ("mxfp4", 352),
        ("fp8", 72),
        ("fp8-128", 200),
        ("q4_1", 352),
        ("q8_0", 160),
        ("q4_k", 512),
    ],
)
def test_packed_weights_take_the_announced_memory(form: str, inputs: int, matmul: WholeMatmul | BlockedMatmul) -> None:
    weight = random_weight(24, inputs, ALL_FORMS[form])
    for dtype in DTYPES.values():
        packed = QuantizedProducts(FAST, torch.device("cpu"), dtype, 16, matmul).pack(weight, None)
        parts = {part.data_ptr(): part.numel() * part.element_size() for part in packed.parts}
        assert sum(parts.values()) == packed_bytes(weight.form, weight.shape, dtype)
    assert packed_bytes(weight.form, weight.shape, torch.float32) == 24 * inputs * 4


def test_weights_are_dequantised_beside_fp32() -> None:
    products = QuantizedProducts(FAST, torch.device("cpu"), torch.float32, 4, WholeMatmul())
    weights = DeviceWeights(torch.device("cpu"), torch.float32, products)
    for form in ("int8", "fp8"):
        weight = random_weight(8, 64, FORMS[form])
        packed = weights.pack_linear(weight, None)
        assert isinstance(packed, CudaLinear)
        assert torch.equal(packed.weight, weight.dequantize())
    assert not list(products.kernels())
