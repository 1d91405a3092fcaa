"""The kernels for ARM, run by qemu: the other modules' tests, with fewer cases and smaller sizes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, DecoderConfig, NormKind, QkNormScope
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.native_ops import NativeOps
from tests.backend.passes.conftest import MakeOps
from tests.backend.passes.cpu import test_attention as attention
from tests.backend.passes.cpu import test_kv_cache as kv_cache
from tests.backend.passes.cpu import test_quantized_experts as quantized_experts
from tests.backend.passes.cpu import test_quantized_linear as quantized
from tests.backend.passes.cpu import test_row_ops as row_ops
from tests.backend.passes.cpu.arm.arm_libraries import CPUS, start_driver
from tests.backend.passes.cpu.arm.remote_kernels import RemoteKernels
from tests.backend.passes.cpu.ops_harness import (
    BASE,
    BF16,
    FP32,
    PLAIN,
    OpsHarness,
    check_rows_alone,
    randn,
    step_batch,
)
from tests.backend.passes.cpu.test_tiles import VALUES, bits_of, multiply, random_bf16
from tests.backend.passes.decoder import test_decoder_pass as passes
from tests.backend.passes.decoder import test_hybrid as hybrid
from tests.backend.passes.decoder import test_scored_prompts as scored_prompts

pytestmark = pytest.mark.timeout(300)  # the first test compiles for every ARM path

KV_DTYPES = ("fp32", "bf16", "q8_0")
for_both_dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module", params=CPUS)
def kernels(request: pytest.FixtureRequest) -> Iterator[RemoteKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        driver = start_driver(request.param, monkeypatch)
    yield RemoteKernels(driver)
    driver.close()


@pytest.fixture
def make_ops(kernels: RemoteKernels) -> Iterator[MakeOps]:
    def make(config: DecoderConfig, dtype: torch.dtype = FP32, num_threads: int = 2) -> NativeOps:
        library: Any = kernels
        return NativeOps(
            library,
            config,
            Dtype.of(dtype),
            max_batch_tokens=8,
            num_threads=num_threads,
            spin_s=20e-6,
            uses_tiles=False,
        )

    yield make
    kernels.destroy_engines()


def test_emulated_cpu_refuses_instructions_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the other tests show that "neon" has none but those of ARMv8.0."""
    driver = start_driver("neon_bf16", monkeypatch, cpu=CPUS["neon"])
    library: Any = RemoteKernels(driver)
    ops = NativeOps(library, BASE, Dtype.BF16, max_batch_tokens=8, num_threads=1, spin_s=0.0, uses_tiles=False)
    harness = OpsHarness(ops)
    harness.begin(1)
    linear = ops.pack_linear(randn(100, BASE.hidden_size, dtype=BF16), None)
    with pytest.raises(RuntimeError, match=f"ended with status -{signal.SIGILL}"):
        ops.linear(harness.put("_hidden", randn(1, BASE.hidden_size)), linear)


@for_both_dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 7, 49])
def test_linear_operations_match_float64(num_rows: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_linear_operations_match_float64(num_rows, True, dtype, make_ops)


@for_both_dtypes
def test_long_products_match_float64(dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_long_products_match_float64(97, dtype, make_ops)


@for_both_dtypes
def test_silu_does_not_overflow(dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_silu_does_not_overflow(dtype, make_ops)


@for_both_dtypes
@pytest.mark.parametrize("hidden", [2, 72])
def test_rms_norm_matches_float64(hidden: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_rms_norm_matches_float64(hidden, dtype, make_ops)


@for_both_dtypes
def test_layer_norm_matches_float64(dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_layer_norm_matches_float64(72, dtype, make_ops)


@for_both_dtypes
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_of_a_product_is_added(kind: NormKind, dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_norm_of_a_product_is_added_to_the_residual_stream(kind, dtype, make_ops)


@for_both_dtypes
def test_gelu_linears_and_soft_caps_match_float64(dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_gelu_linears_match_float64(dtype, make_ops)
    row_ops.test_logits_are_scaled_and_capped(100, dtype, make_ops)


@pytest.mark.parametrize("scope", ["each head", "projection"])
def test_queries_and_keys_are_normalised_over_the_norms_scope(scope: QkNormScope, make_ops: MakeOps) -> None:
    kv_cache.test_queries_and_keys_are_normalised_over_the_norms_scope("layer", scope, BF16, make_ops)


@for_both_dtypes
def test_experts_match_float64(dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_experts_match_float64(True, ClampedGate(1.7, 0.8), dtype, make_ops)


@pytest.mark.parametrize("form", ["int8", "int4-128 with zeros"])
def test_quantised_experts_match_float64(form: str, make_ops: MakeOps) -> None:
    quantized_experts.test_quantised_experts_match_float64(form, BF16, make_ops)


@for_both_dtypes
@pytest.mark.parametrize("tied", [False, True])
def test_embed_looks_up_the_exact_rows(tied: bool, dtype: torch.dtype, make_ops: MakeOps) -> None:
    row_ops.test_embed_looks_up_the_exact_rows(tied, dtype, make_ops)


@for_both_dtypes
@pytest.mark.parametrize("inputs", [30, 100])
def test_int8_product_matches_float64(inputs: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    quantized.test_int8_product_matches_float64(inputs, dtype, make_ops)


@pytest.mark.parametrize("form", quantized.INT4_FORMS)
def test_int4_product_matches_float64(form: str, make_ops: MakeOps) -> None:
    quantized.test_int4_product_matches_float64(form, BF16, make_ops)


@pytest.mark.parametrize("name", quantized.BLOCKS)
def test_blocks_of_ggml_are_packed_like_their_numbers(name: str, make_ops: MakeOps) -> None:
    quantized.test_blocks_of_ggml_are_packed_like_their_numbers(name, make_ops)


@pytest.mark.parametrize("form", quantized.GROUPED)
def test_grouped_product_matches_float64(form: str, make_ops: MakeOps) -> None:
    quantized.test_grouped_product_matches_float64(form, BF16, make_ops)


@pytest.mark.parametrize("form", ["int8", "int4 with zeros"])
def test_each_quantised_linear_adds_its_bias_and_writes_its_output(form: str, make_ops: MakeOps) -> None:
    quantized.test_each_linear_adds_its_bias_and_writes_its_output(form, 7, BF16, make_ops)


def test_largest_quantised_sums_do_not_overflow(make_ops: MakeOps) -> None:
    quantized.test_largest_int8_sums_do_not_overflow(make_ops)
    quantized.test_largest_int4_sums_do_not_overflow(32, make_ops)


@pytest.mark.parametrize("form", ["int8", "int4 with zeros"])
def test_quantised_lm_head_serves_as_the_embedding_table(form: str, make_ops: MakeOps) -> None:
    quantized.test_quantised_lm_head_serves_as_the_embedding_table(form, make_ops)


def test_all_memory_is_read(make_ops: MakeOps) -> None:
    row_ops.test_all_memory_is_read(3 * 2**18 + 256, make_ops)


@for_both_dtypes
def test_queries_are_normalised_and_rotated(dtype: torch.dtype, make_ops: MakeOps) -> None:
    kv_cache.test_queries_are_normalised_and_rotated(True, 24, dtype, make_ops)


@for_both_dtypes
@pytest.mark.parametrize("page_size", [5, 16])
def test_q8_0_stores_the_same_bytes_as_ggml(page_size: int, dtype: torch.dtype, make_ops: MakeOps) -> None:
    kv_cache.test_q8_0_stores_the_same_bytes_as_ggml(page_size, dtype, make_ops)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_q8_0_cache_keeps_values_that_are_not_finite(bad: float, side: str, make_ops: MakeOps) -> None:
    kv_cache.test_q8_0_cache_keeps_values_that_are_not_finite(bad, side, make_ops)


@for_both_dtypes
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("page_size", "window"), [(5, None), (16, 9), (48, None), (64, 9)])
def test_attention_matches_float64_for_any_page_size(
    page_size: int, window: int | None, kv_dtype: str, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    """Decode and prefill rows in one step, with lengths near a page and near a block of 64."""
    contexts, lengths = [0, page_size, 62, 64, 130, 3], [1, 1, 1, 1, 30, 70]
    harness = OpsHarness(make_ops(BASE, dtype), 100, page_size, kv_dtype)
    attention.check_attention(harness, BASE, dtype, kv_dtype, contexts, lengths, page_size, window)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 256), (3, 96), (32, 64)])
def test_attention_matches_float64_for_any_head_shape(
    group: int, head_dim: int, kv_dtype: str, make_ops: MakeOps
) -> None:
    config = replace(BASE, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    harness = OpsHarness(make_ops(config, BF16), 64, 16, kv_dtype)
    attention.check_attention(harness, config, BF16, kv_dtype, [0, 70, 12], [1, 1, 20], 16)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_matches_float64_over_long_contexts(kv_dtype: str, make_ops: MakeOps) -> None:
    """Contexts so long that the kernels divide a row into pieces, also among several threads."""
    for contexts, window, sinks in (([1100], None, None), ([1023, 3, 512], 700, torch.tensor([-3.0, 0.5, 7.0, 9.0]))):
        harness = OpsHarness(make_ops(BASE, BF16), 160, 32, kv_dtype)
        attention.check_attention(harness, BASE, BF16, kv_dtype, contexts, [1] * len(contexts), 32, window, sinks)


@for_both_dtypes
def test_rows_are_the_same_bits_in_any_batch_size(dtype: torch.dtype, make_ops: MakeOps) -> None:
    config = replace(BASE, hidden_size=136, intermediate_size=72)
    harness = OpsHarness(make_ops(config, dtype))
    check_rows_alone(harness, (136, 144), dtype, 53, [(0, 1), (52, 53), (7, 9), (5, 22)])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_row_is_the_same_bits_on_any_pages_and_threads(kv_dtype: str, make_ops: MakeOps) -> None:
    """In prefill with others of its prompt, and in decode, where two threads divide it."""
    qkv = randn(600, 8 * 32, dtype=BF16)
    found = []
    for page_size, num_threads in ((32, 1), (5, 2), (48, 2)):
        harness = OpsHarness(make_ops(BASE, BF16, num_threads), 120, page_size, kv_dtype)
        for context in (0, 590, 599):
            batch = replace(
                step_batch([0], [600], page_size),
                input_ids=np.zeros(600 - context, np.int32),
                query_starts=np.array([0, 600 - context], np.int32),
                context_lens=np.array([context], np.int32),
            )
            step = harness.ops.begin_step(batch, batch.input_ids)
            array = harness.put("_qkv", qkv[context:])
            harness.ops.rotate_and_store(array, step, PLAIN)
            if context > 0:
                found.append(harness.get("_attended", harness.ops.attention(array, step, PLAIN), 600 - context)[-1])
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_products_are_the_same_bits_for_any_thread_count(make_ops: MakeOps) -> None:
    x, weight = randn(7, BASE.hidden_size, dtype=BF16), randn(700, BASE.hidden_size, dtype=BF16, seed=1)
    config, results = replace(BASE, vocab_size=700), []
    for num_threads in (1, 2, 3):
        harness = OpsHarness(make_ops(config, BF16, num_threads))
        harness.begin(7)
        packed, array = harness.ops.pack_linear(weight, None), harness.put("_hidden", x)
        results += [harness.ops.logits(array, packed).copy() for _ in range(5)]
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])


@pytest.mark.parametrize("values", VALUES)
def test_each_product_is_one_chain_of_fused_additions(values: str, make_ops: MakeOps) -> None:
    """So it has the same bits with AVX2, with NEON, and with NEON's instructions for bf16."""
    rng = np.random.default_rng(1)
    exponents, special = VALUES[values]
    x, weight = (random_bf16(rng, (n, 98), exponents, special) for n in (9, 70))
    expected = np.zeros((9, 70), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in zip(x.double().numpy().T, weight.double().numpy().T, strict=True):
            # float64 holds the product, and as much of the sum as rounding it to float32 needs.
            expected = (expected + np.outer(a, b)).astype(np.float32)
    for num_rows in (1, 2, 3, 9):
        found = multiply(make_ops, x[:num_rows], weight)
        np.testing.assert_array_equal(bits_of(found), bits_of(expected[:num_rows]))


def test_64_greedy_tokens_equal_those_of_transformers(make_ops: MakeOps) -> None:
    passes.check_64_greedy_tokens("qwen3", make_ops)


def test_layers_with_a_delta_rule_equal_those_of_transformers(make_ops: MakeOps) -> None:
    passes.test_logits_on_every_path_equal_those_of_transformers("qwen3.5", make_ops)
    hybrid.test_logits_are_the_same_bits_in_any_chunks_and_slots("qwen3.5-vision", BF16, make_ops)


def test_prompts_are_scored_as_by_transformers(make_ops: MakeOps) -> None:
    scored_prompts.test_prompts_are_scored_as_by_transformers("gemma2", 7, make_ops)


@pytest.mark.parametrize("num_top", [0, 5])
def test_scores_equal_float64_also_with_ties_and_infinite_logits(num_top: int, make_ops: MakeOps) -> None:
    scored_prompts.test_scores_equal_float64_also_with_ties_and_infinite_logits(num_top, make_ops)


def test_unwritten_cache_positions_are_never_read(make_ops: MakeOps) -> None:
    passes.test_unwritten_cache_positions_are_never_read(16, "q8_0", make_ops)
