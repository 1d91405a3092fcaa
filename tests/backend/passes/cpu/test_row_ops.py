"""Operations on single rows, by each implementation, against float64: linears, norms, SiLU, embedding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, Experts, NormKind, Scales, TensorNames
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear
from penstock.backend.passes.ops.interface import ExpertWeights
from tests.backend.passes.conftest import MakeOps, make_native_ops, make_tile_ops
from tests.backend.passes.cpu.ops_harness import (
    BASE,
    BF16,
    FP32,
    OpsHarness,
    assert_close,
    check_rows_alone,
    randn,
    step_batch,
)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_rows", [1, 6, 13, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_operations_match_float64(num_rows: int, biased: bool, dtype: torch.dtype, make_ops: MakeOps) -> None:
    """With widths that do not fill whole panels of the packed layout."""
    harness = OpsHarness(make_ops(BASE, dtype))
    harness.begin(num_rows)
    ops, hidden, intermediate = harness.ops, BASE.hidden_size, BASE.intermediate_size
    x = randn(num_rows, hidden, dtype=dtype, seed=1)
    for name, call, outputs in (("_qkv", ops.linear, 256), ("_logits", ops.logits, BASE.vocab_size)):
        weight, bias = randn(outputs, hidden, dtype=dtype, seed=2), randn(outputs, dtype=dtype, seed=3)
        exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
        found = call(harness.put("_hidden", x), ops.pack_linear(weight, bias if biased else None))
        assert_close(harness.get(name, found, num_rows), exact, dtype)
    weight, bias = randn(2 * intermediate, hidden, dtype=dtype, seed=4), randn(2 * intermediate, dtype=dtype, seed=5)
    gate, up = (x.double() @ weight.double().T + (bias.double() if biased else 0)).chunk(2, dim=1)
    gated = ops.activated_linear(
        harness.put("_hidden", x), ops.pack_linear(weight, bias if biased else None, is_gated=True)
    )
    assert_close(harness.get("_gated", gated, num_rows), torch.nn.functional.silu(gate) * up, dtype)
    residual, y = randn(num_rows, hidden, seed=6), randn(num_rows, intermediate, dtype=dtype, seed=7)
    weight, bias = randn(hidden, intermediate, dtype=dtype, seed=8), randn(hidden, dtype=dtype, seed=9)
    exact = residual.double() + y.double() @ weight.double().T + (bias.double() if biased else 0)
    array = harness.put("_residual", residual)
    ops.linear_add(harness.put("_gated", y), ops.pack_linear(weight, bias if biased else None), array)
    assert_close(harness.get("_residual", array, num_rows), exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("num_rows", [7, 97, 200])
def test_long_products_match_float64(num_rows: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    """With more inputs and more rows than the native kernel handles at once."""
    config = replace(BASE, intermediate_size=4500)
    harness = OpsHarness(make_ops(config, dtype))
    harness.begin(num_rows)
    residual, x = randn(num_rows, 48, seed=1), randn(num_rows, 4500, dtype=dtype, seed=2)
    weight = randn(48, 4500, dtype=dtype, seed=3)
    array = harness.put("_residual", residual)
    harness.ops.linear_add(harness.put("_gated", x), harness.ops.pack_linear(weight, None), array)
    assert_close(harness.get("_residual", array, num_rows), residual.double() + x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_silu_does_not_overflow(dtype: torch.dtype, make_ops: MakeOps) -> None:
    config = replace(BASE, hidden_size=2, intermediate_size=16)
    harness = OpsHarness(make_ops(config, dtype))
    harness.begin(1)
    gates = torch.tensor(
        [-3e38, -1e4, -200.0, -88.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 88.0, 200.0, 1e4, 1e30, 3e38]
    )
    weight = torch.stack([torch.cat([gates, torch.zeros(16)]), torch.cat([torch.zeros(16), torch.ones(16)])], dim=1)
    found = harness.ops.activated_linear(
        harness.put("_hidden", torch.ones(1, 2, dtype=dtype)),
        harness.ops.pack_linear(weight.to(dtype), None, is_gated=True),
    )
    exact = torch.nn.functional.silu(gates.to(dtype).double())
    torch.testing.assert_close(
        harness.get("_gated", found, 1)[0].double(), exact, rtol=1e-5 if dtype is FP32 else 8e-3, atol=1e-30
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("hidden", [2, 16, 48, 72, 1000])
def test_rms_norm_matches_float64(hidden: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    harness = OpsHarness(make_ops(replace(BASE, hidden_size=hidden), dtype))
    harness.begin(9)
    x, weight = randn(9, hidden, seed=1), randn(hidden, seed=2)
    found = harness.ops.norm(harness.put("_residual", x), harness.ops.vector(weight))
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + BASE.norm_eps) * weight.double()
    assert_close(harness.get("_hidden", found, 9), exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("hidden", [2, 48, 72, 1000])
def test_layer_norm_matches_float64(hidden: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    """The rows' mean is far from 0."""
    harness = OpsHarness(make_ops(replace(BASE, hidden_size=hidden, norm="layer"), dtype))
    harness.begin(9)
    x, weight, bias = randn(9, hidden, seed=1) + 7, randn(hidden, seed=2), randn(hidden, seed=3)
    found = harness.ops.norm(harness.put("_residual", x), harness.ops.vector(torch.cat([weight, bias])))
    exact = layer_norm(x.double(), (hidden,), weight.double(), bias.double(), BASE.norm_eps)
    assert_close(harness.get("_hidden", found, 9), exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_norm_without_a_weight_only_converts(dtype: torch.dtype, make_ops: MakeOps) -> None:
    harness = OpsHarness(make_ops(replace(BASE, hidden_size=72), dtype))
    harness.begin(3)
    x = randn(3, 72)
    found = harness.ops.norm(harness.put("_residual", x), None)
    assert torch.equal(harness.get("_hidden", found, 3), x.to(dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_of_a_product_is_added_to_the_residual_stream(
    kind: NormKind, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    names = TensorNames(attention_output_norm="given")
    harness = OpsHarness(make_ops(replace(BASE, norm=kind, names=names), dtype))
    harness.begin(7)
    ops, hidden = harness.ops, BASE.hidden_size
    residual, x = randn(7, hidden, seed=1), randn(7, 128, dtype=dtype, seed=2)
    weight, norm = randn(hidden, 128, dtype=dtype, seed=3), randn(2 * hidden, seed=4)
    product = x.double() @ weight.double().T
    if kind == "rms":
        norm = norm[:hidden]
        exact = rms_norm(product, (hidden,), norm.double(), BASE.norm_eps)
    else:
        exact = layer_norm(product, (hidden,), *norm.double().chunk(2), BASE.norm_eps)
    array = harness.put("_residual", residual)
    ops.linear_add(harness.put("_attended", x), ops.pack_linear(weight, None), array, ops.vector(norm))
    assert_close(harness.get("_residual", array, 7), residual.double() + exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gelu_linears_match_float64(dtype: torch.dtype, make_ops: MakeOps) -> None:
    """With arguments from far below 0, where the result is 0, to far above it."""
    harness = OpsHarness(make_ops(replace(BASE, activation="gelu_tanh"), dtype))
    harness.begin(7)
    ops, hidden, intermediate = harness.ops, BASE.hidden_size, BASE.intermediate_size
    x, weight = randn(7, hidden, dtype=dtype, seed=1), randn(2 * intermediate, hidden, dtype=dtype, seed=2)
    bias = torch.linspace(-40, 40, 2 * intermediate, dtype=dtype)
    product = x.double() @ weight.double().T + bias.double()
    gate, up = product.chunk(2, dim=1)
    gated = harness.get(
        "_gated", ops.activated_linear(harness.put("_hidden", x), ops.pack_linear(weight, bias, is_gated=True)), 7
    )
    assert_close(gated, gelu(gate, approximate="tanh") * up, dtype)
    packed = ops.pack_linear(weight[:intermediate], bias[:intermediate])
    activated = harness.get("_gated", ops.activated_linear(harness.put("_hidden", x), packed), 7)
    assert_close(activated, gelu(gate, approximate="tanh"), dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("vocab_size", [100, 1000])
def test_logits_are_scaled_and_capped(vocab_size: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    config = replace(BASE, vocab_size=vocab_size, scales=Scales(logits_softcap=3.0))
    harness = OpsHarness(make_ops(config, dtype))
    harness.begin(5)
    x, weight = randn(5, BASE.hidden_size, dtype=dtype, seed=1), randn(vocab_size, BASE.hidden_size, dtype=dtype)
    found = harness.ops.logits(harness.put("_hidden", x), harness.ops.pack_linear(weight, None, 0.7))
    exact = 3 * torch.tanh(0.7 * (x.double() @ weight.double().T) / 3)
    assert_close(harness.get("_logits", found, 5), exact, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_scaled_by_a_number_of_the_weights_dtype(
    tied: bool, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    harness = OpsHarness(make_ops(replace(BASE, scales=Scales(embedding=55.4256)), dtype))
    weight = randn(BASE.vocab_size, BASE.hidden_size, dtype=dtype)
    batch = replace(step_batch([0], [3], 16), input_ids=np.array([99, 0, 63], np.int32))
    ops = harness.ops
    table = ops.packed_table(weight, ops.pack_linear(weight, None)) if tied else ops.table(weight)
    found = harness.get("_residual", ops.embed(table, ops.begin_step(batch, batch.input_ids)), 3)
    scale = 55.5 if dtype is BF16 else np.float32(55.4256)
    torch.testing.assert_close(found, weight[batch.input_ids].float() * scale, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tied", [False, True])
def test_embed_looks_up_the_exact_rows(tied: bool, dtype: torch.dtype, make_ops: MakeOps) -> None:
    harness = OpsHarness(make_ops(BASE, dtype), num_pages=3)
    weight = randn(BASE.vocab_size, BASE.hidden_size, dtype=dtype)
    ids = np.array([99, 0, 63, 64, 65, *range(30)], np.int32)
    batch = replace(step_batch([0], [len(ids)], 16), input_ids=ids)
    ops = harness.ops
    table = ops.packed_table(weight, ops.pack_linear(weight, None)) if tied else ops.table(weight)
    found = ops.embed(table, ops.begin_step(batch, ids))
    torch.testing.assert_close(harness.get("_residual", found, len(ids)), weight[ids].float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_are_the_same_bits_in_any_batch_size(dtype: torch.dtype, make_deterministic: MakeOps) -> None:
    """With sizes at which libraries choose other kernels, or divide arrays among their threads."""
    intermediate = 222 if make_deterministic is make_tile_ops else 2222  # of so many, emulated tiles take seconds
    config = replace(BASE, hidden_size=520, intermediate_size=intermediate)
    harness = OpsHarness(make_deterministic(config, dtype))
    check_rows_alone(harness, (520, 2 * intermediate), dtype, 301, [(0, 1), (77, 78), (300, 301), (5, 22), (64, 160)])


def test_bf16_products_work_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    x, weight, bias = randn(7, 48, dtype=BF16), randn(100, 48, dtype=BF16, seed=1), randn(100, dtype=BF16, seed=2)
    linear = PackedLinear.pack(weight, bias)
    assert linear.weight is weight
    assert_close(linear(x), x.double() @ weight.double().T + bias.double(), BF16)


@cache
def experts_example(normalises: bool, clamped: ClampedGate | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows, residual stream, router, gate and up, down, three biases, and the exact results; kept, because all
    implementations are compared with them."""
    hidden, num_rows = BASE.hidden_size, 330
    x, residual = randn(num_rows, hidden, dtype=dtype, seed=1), randn(num_rows, hidden, seed=2)
    router = randn(19, hidden, dtype=dtype, seed=3)
    x[:, 0], router[:, 0] = 1, torch.linspace(-20, 30, 19).to(dtype)
    router[17] = router[18]
    gate_up = randn(19 * 2 * 70, hidden, dtype=dtype, seed=4) / 7
    down = randn(19 * hidden, 70, dtype=dtype, seed=5) / 8
    scale = 0 if clamped is None else 1
    biases = [scale * randn(*shape, dtype=dtype, seed=6) for shape in ((19,), (19, 140), (19, hidden))]
    router_bias, gate_up_bias, down_bias = (bias.double() for bias in biases)
    probabilities = (x.double() @ router.double().T + router_bias).softmax(dim=1)
    exact = residual.double()
    uses = [0] * 19
    for row in range(num_rows):
        chosen = sorted(range(19), key=lambda i, p=probabilities[row]: (-float(p[i]), i))[:3]
        total = probabilities[row, chosen].sum() if normalises else 1.0
        for i in chosen:
            product = x[row].double() @ gate_up[i * 140 : (i + 1) * 140].double().T + gate_up_bias[i]
            mixed = mix_exactly(*product.chunk(2), clamped)
            result = mixed @ down[i * hidden : (i + 1) * hidden].double().T + down_bias[i]
            exact[row] += 0.5 * probabilities[row, i] / total * result
            uses[i] += 1
    assert min(uses) == 0
    assert 1 in uses
    assert max(uses) > 256
    return x, residual, router, gate_up, down, *biases, exact


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("normalises", "clamped"), [(False, None), (True, None), (True, ClampedGate(1.7, 0.8))], ids=["", "sum 1", "biased"]
)
def test_experts_match_float64(
    normalises: bool, clamped: ClampedGate | None, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    """Experts with no row, with one and with more than the native kernel multiplies at once; two with equal logits.
    Those with clamped gates have biases."""
    biased = clamped is not None
    settings = Experts(19, per_token=3, width=70, normalises=normalises, biased=biased, clamped_gate=clamped)
    config = replace(BASE, experts=settings, layer_has_experts=(True,))
    x, residual, router, gate_up, down, *biases, exact = experts_example(normalises, clamped, dtype)
    harness = OpsHarness(make_ops(config, dtype))
    harness.begin(len(x))
    array = harness.put("_residual", residual)
    given = [bias.flatten() for bias in biases] if biased else []
    experts = harness.ops.experts.pack(ExpertWeights(router, gate_up, down, *given), 0.5)
    harness.ops.experts.add(harness.put("_hidden", x), experts, array)
    assert_close(harness.get("_residual", array, len(x)), exact, dtype)


def mix_exactly(gate: Tensor, up: Tensor, clamped: ClampedGate | None) -> Tensor:
    if clamped is None:
        return silu(gate) * up
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_native_results_are_the_same_bits_for_any_thread_count(num_threads: int) -> None:
    """Many small jobs in sequence, so that the threads interleave in many orders."""
    x, weight = randn(7, BASE.hidden_size, dtype=BF16), randn(2000, BASE.hidden_size, dtype=BF16, seed=1)
    config = replace(BASE, vocab_size=2000)
    results = []
    for threads in (1, num_threads):
        harness = OpsHarness(make_native_ops(config, BF16, threads))
        harness.begin(7)
        packed = harness.ops.pack_linear(weight, None)
        array = harness.put("_hidden", x)
        results.append([harness.ops.logits(array, packed).copy() for _ in range(300 if threads > 1 else 1)])
        harness.ops.close()
    for found in results[1]:
        np.testing.assert_array_equal(found, results[0][0])


@pytest.mark.parametrize("num_floats", [0, 128, 3 * 2**18 + 256])
def test_all_memory_is_read(num_floats: int, make_kernels: MakeOps) -> None:
    ops = make_kernels(BASE)
    numbers = torch.arange(num_floats) % 5 - 1
    assert ops.weights.read_memory(numbers.float().numpy()) == int(numbers.sum())
