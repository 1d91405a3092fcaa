"""Mixtures of experts with int8 and int4 weights, by each implementation, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
from penstock.backend.passes.ops.interface import ExpertWeights
from tests.backend.passes.conftest import MakeOps
from tests.backend.passes.cpu.ops_harness import BASE, BF16, FP32, OpsHarness, randn
from tests.backend.passes.cpu.test_quantized_linear import exact_product, random_weight

HIDDEN, WIDTH, COUNT = 384, 128, 7
SETTINGS = Experts(count=COUNT, per_token=2, width=WIDTH, normalises=True)
CONFIG = replace(BASE, hidden_size=HIDDEN, experts=SETTINGS, layer_has_experts=(True,))
FORMS = {
    "int8": ("int8", "int8"),
    "int4": ("int4 groups of 32", "int4 groups of 32"),
    "int4-128 with zeros": ("int4 groups of 128 with zeros", "int4 groups of 128 with zeros"),
    "int4 and floats": ("int4 with zeros", None),
    "floats and int8": (None, "int8"),
    "mxfp4": ("mxfp4", "mxfp4"),
}
"""The forms of gate and up, and of down: a checkpoint may keep one of them in a form that no kernel multiplies."""


def random_experts(form: str, dtype: torch.dtype) -> ExpertWeights:
    """All rows take the first expert, few the second, and none the last."""
    router = randn(COUNT, HIDDEN, dtype=dtype, seed=3) / 30
    router[:, 0] = torch.tensor([3.0, -1, 0, 0, 0, 0, -9]).to(dtype)
    gate_up, down = FORMS[form]
    return ExpertWeights(
        router,
        _random_weight(gate_up, COUNT * 2 * WIDTH, HIDDEN, dtype, seed=4),
        _random_weight(down, COUNT * HIDDEN, WIDTH, dtype, seed=5),
    )


def _random_weight(
    form: str | None, outputs: int, inputs: int, dtype: torch.dtype, seed: int
) -> Tensor | QuantizedWeight:
    return randn(outputs, inputs, dtype=dtype, seed=seed) / 16 if form is None else random_weight(form, outputs, inputs)


def random_rows(num_rows: int, dtype: torch.dtype) -> Tensor:
    x = randn(num_rows, HIDDEN, dtype=dtype, seed=1)
    x[:, 0] = 1
    return x


def add_experts(make: MakeOps, x: Tensor, weights: ExpertWeights) -> Tensor:
    """To a residual stream of zeros."""
    harness = OpsHarness(make(CONFIG, x.dtype))
    harness.begin(len(x))
    array = harness.put("_residual", torch.zeros(len(x), HIDDEN))
    experts = harness.ops.experts
    experts.add(harness.put("_hidden", x), experts.pack(weights, 0.5), array)
    found = harness.get("_residual", array, len(x))
    harness.ops.close()
    return found


def product_of_expert(x: Tensor, weights: Tensor | QuantizedWeight, expert: int) -> Tensor:
    """float64; rows of x are rounded to int8 for quantised weights."""
    rows = weights.shape[0] // COUNT
    part = slice(expert * rows, (expert + 1) * rows)
    if isinstance(weights, Tensor):
        return x.double() @ weights[part].double().T
    return exact_product(x, take_rows(weights, part))


def exact_sums(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, list[int]]:
    """float64, and how many rows each expert has. What experts multiply next has the dtype of x."""
    probabilities, chosen = (x.double() @ weights.router.double().T).softmax(dim=1).topk(SETTINGS.per_token)
    probabilities /= probabilities.sum(dim=1, keepdim=True)
    exact, uses = torch.zeros(x.shape, dtype=torch.float64), []
    for expert in range(COUNT):
        rows, places = (chosen == expert).nonzero().unbind(1)
        uses.append(len(rows))
        if not uses[-1]:
            continue
        gate, up = product_of_expert(x[rows], weights.gate_up, expert).chunk(2, dim=1)
        result = product_of_expert((silu(gate) * up).to(x.dtype), weights.down, expert)
        exact[rows] += 0.5 * probabilities[rows, places, None] * result
    return exact, uses


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_experts_match_float64(form: str, dtype: torch.dtype, make_ops: MakeOps) -> None:
    """Experts with no row, with few and with more than a kernel multiplies at once."""
    x, weights = random_rows(280, dtype), random_experts(form, dtype)
    exact, uses = exact_sums(x, weights)
    assert (uses[0], uses[-1]) == (280, 0)
    assert 0 < uses[1] < 40
    found = add_experts(make_ops, x, weights).double()
    errors = (found - exact).abs().amax(dim=1) / exact.abs().max()
    # Where a number lies halfway between two steps of int8 or bf16, it may be rounded either way.
    assert float(errors.max()) < (0.005 if dtype is FP32 else 0.02)
    assert dtype is BF16 or float(errors.quantile(0.8)) < 1e-5


@pytest.mark.parametrize(("form", "dtype"), [(form, (FP32, BF16)[i % 2]) for i, form in enumerate(FORMS)])
def test_row_has_the_same_bits_in_any_batch(form: str, dtype: torch.dtype, make_deterministic: MakeOps) -> None:
    x, weights = random_rows(280, dtype), random_experts(form, dtype)
    together = add_experts(make_deterministic, x, weights)
    for first, last in ((0, 1), (77, 79), (64, 161)):
        assert torch.equal(add_experts(make_deterministic, x[first:last], weights), together[first:last])
