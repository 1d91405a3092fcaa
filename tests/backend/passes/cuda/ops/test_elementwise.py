"""The elementwise kernels on the emulator agree with float64, torch's dtypes and the CPU's q8_0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.backend.passes.cpu.in_torch.paged_cache import quantise_q8_0
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import copy_pages
from penstock.backend.passes.cuda.ops.elementwise import unsupported_reason
from penstock.backend.passes.ops.interface import HeadShape, supports_q8_0
from penstock.tools.gpu.cases.elementwise import (
    DTYPES,
    Rows,
    StoreCase,
    check_added_norm,
    check_close,
    check_embedding,
    check_gate,
    check_gather,
    check_gelu,
    check_layer_norm,
    check_norm,
    check_norm_of_all_heads,
    check_page_copies,
    check_store,
    ints,
    make,
    poisoned,
    rms_norm,
    rope_rows,
)
from penstock.tools.gpu.cases.streams import check_cut_gates, check_streams
from tests.cuda_emulator import EmulatedLauncher

LAUNCHERS = {
    "fast": EmulatedLauncher(),
    "forward": EmulatedLauncher("check", "forward"),
    "reverse": EmulatedLauncher("check", "reverse"),
    "random": EmulatedLauncher("check", "random", 3),
}


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> EmulatedLauncher:
    return LAUNCHERS[request.param]


# ---- Norms ----


@pytest.mark.parametrize("hidden", [8, 72, 1024, 4104])
def test_the_norm_of_the_sum_agrees_with_float64(dtype: torch.dtype, hidden: int) -> None:
    check_norm(LAUNCHERS["fast"], dtype, hidden)


@pytest.mark.parametrize(("hidden", "num_threads"), [(264, 64), (1024, 128), (4096, 512), (4104, 288), (16384, 1024)])
def test_norms_of_up_to_4096_values_have_a_thread_for_every_eight(hidden: int, num_threads: int) -> None:
    norms = [kernel for kernel in make(LAUNCHERS["fast"], hidden=hidden).kernels if kernel.source == "rows/norms.cu"]
    assert [kernel.num_threads for kernel in norms[:3]] == [num_threads] * 3


def test_the_widest_norm_fits_a_block() -> None:
    residual, weight = torch.randn(1, 16384), torch.randn(16384)
    out = poisoned(1, 16384, dtype=torch.float32)
    make(LAUNCHERS["fast"], hidden=16384).add_rms_norm(residual, None, weight, out)
    check_close("the norm", out, rms_norm(residual, weight), torch.float32)


def test_a_norm_without_a_delta_leaves_the_residual(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    residual, weight = torch.randn(2, 264), torch.randn(264)
    before, out = residual.clone(), poisoned(2, 264, dtype=dtype)
    make(launcher, dtype, hidden=264).add_rms_norm(residual, None, weight, out)
    assert torch.equal(residual, before)
    check_close("the norm", out, rms_norm(before, weight), dtype)


def test_norms_have_no_races_and_stay_in_bounds(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    check_norm(launcher, dtype, hidden=1032)


@pytest.mark.parametrize("hidden", [8, 72, 4104])
def test_layer_norms_agree_with_float64(dtype: torch.dtype, hidden: int) -> None:
    check_layer_norm(LAUNCHERS["fast"], dtype, hidden)


@pytest.mark.parametrize("hidden", [8, 72, 4104])
def test_norms_of_addends_agree_with_float64(dtype: torch.dtype, hidden: int) -> None:
    check_added_norm(LAUNCHERS["fast"], dtype, hidden)


@pytest.mark.parametrize("heads", [HeadShape(1, 1, 64), HeadShape(40, 8, 128)])
def test_norms_of_all_heads_together_agree_with_float64(dtype: torch.dtype, heads: HeadShape) -> None:
    check_norm_of_all_heads(LAUNCHERS["fast"], dtype, heads)


def test_other_norms_have_no_races_and_stay_in_bounds(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    check_layer_norm(launcher, dtype, hidden=1032)
    check_added_norm(launcher, dtype, hidden=1032)
    check_norm_of_all_heads(launcher, dtype, HeadShape(5, 2, 80))


def test_gelu_agrees_with_float64(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    check_gelu(launcher, dtype, 1032)


def test_a_norm_does_not_depend_on_the_other_rows() -> None:
    residual, weight = torch.randn(7, 512) * 10, torch.randn(512)
    together, alone = poisoned(7, 512, dtype=torch.float32), poisoned(1, 512, dtype=torch.float32)
    elementwise = make(LAUNCHERS["fast"], hidden=512)
    elementwise.add_rms_norm(residual, None, weight, together)
    elementwise.add_rms_norm(residual[4:5].clone(), None, weight, alone)
    assert torch.equal(together[4], alone[0])


# ---- RoPE and the write to the cache ----


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_each_dtype_is_stored_in_each_cache(dtype: torch.dtype, kv_dtype: str) -> None:
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(4, 2, 64), kv_dtype, 16, 64), dtype, norms=True)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_heads_and_pages_of_all_sizes_are_stored(head_dim: int, page_size: int, kv_dtype: str) -> None:
    if kv_dtype == "q8_0" and not supports_q8_0(head_dim):
        assert unsupported_reason(8, 8, head_dim, head_dim, kv_dtype) is not None
        return
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(7, 1, head_dim), kv_dtype, page_size, head_dim), torch.bfloat16)


@pytest.mark.parametrize("rotary_dim", [16, 48, 128])
def test_rope_can_rotate_a_part_of_a_head(rotary_dim: int) -> None:
    for has_axes in (False, True):
        case = StoreCase(HeadShape(3, 3, 128), "fp32", 16, rotary_dim, has_axes)
        check_store(LAUNCHERS["fast"], case, torch.float32, norms=True)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_heads_can_have_layer_norms_with_weights_of_their_own(
    launcher: EmulatedLauncher, head_dim: int, dtype: torch.dtype
) -> None:
    check_store(launcher, StoreCase(HeadShape(6, 2, head_dim), "fp32", 16, head_dim), dtype, norms=True, centres=True)


def test_a_layer_can_skip_rope(dtype: torch.dtype) -> None:
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(2, 1, 64), "fp32", 16, 64), dtype, rotates=False)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_storing_has_no_races_and_stays_in_bounds(
    launcher: EmulatedLauncher, kv_dtype: str, dtype: torch.dtype
) -> None:
    check_store(launcher, StoreCase(HeadShape(2, 1, 96), kv_dtype, 16, 96), dtype, norms=True)


def store_values(values: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Return the stored numbers and scales of one value vector [head_dim]."""
    case = StoreCase(HeadShape(1, 1, len(values)), kv_dtype, 16, 16)
    qkv = torch.zeros(1, 3 * len(values), dtype=values.dtype)
    qkv[0, 2 * len(values) :] = values
    layer, rows = torch.zeros(case.layout.layer_bytes, dtype=torch.uint8), Rows(ints(0, 1), ints(0), ints(0))
    elementwise = make(LAUNCHERS["fast"], values.dtype, case.heads, 64, 16, kv_dtype)
    elementwise.rope_and_store(qkv, layer, ints(0).view(1, 1), rows, None, None)
    numbers, scales = case.read(layer, 1, 0, 0)
    return numbers[0], scales[0]


def test_q8_0_equals_the_cpu_bit_for_bit_at_the_edges() -> None:
    torch.manual_seed(0)
    for scale in (1e-45, 1e-39, 1e-37, 1e-36, 1e-8, 1.0, 3e4, 1e7, 3e38):
        values = torch.randn(64).clamp(-1, 1) * scale
        values[:4] = torch.tensor([scale, -scale, scale * 0.5 / 127, -0.0])
        expected, expected_scales = quantise_q8_0(values)
        numbers, scales = store_values(values, "q8_0")
        assert torch.equal(numbers, expected.flatten()), scale
        assert torch.equal(scales, expected_scales.flatten()), scale
    halves = torch.arange(-64, 64).clamp(-63.5, 63.5) + 0.5  # with a scale of 0.5, every second one is a tie
    expected, _ = quantise_q8_0(halves)
    assert torch.equal(store_values(halves, "q8_0")[0], expected.flatten())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_q8_0_block_with_a_non_finite_number_has_a_nan_scale(bad: float) -> None:
    values = torch.ones(64)
    values[40] = bad
    _, scales = store_values(values, "q8_0")
    assert scales.isnan().tolist() == [False, True]


def test_fp8_equals_torch_for_every_fp16_number() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite()]
    halves = torch.cat([halves, halves[: -len(halves) % 256]]).view(-1, 256)
    expected = halves.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for row in range(0, len(halves), 9):
        assert torch.equal(store_values(halves[row], "fp8")[0].view(torch.uint8), expected[row])


def test_fp8_saturates_infinities_and_keeps_nan() -> None:
    values = torch.zeros(64)
    values[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e9])
    numbers, _ = store_values(values, "fp8")
    assert numbers[:4].float().nan_to_num(-1).tolist() == [448, -448, -1, 448]


# ---- Activations, gathers, copies ----


@pytest.mark.parametrize("size", [8, 1032])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations_agree_with_float64(dtype: torch.dtype, name: str, size: int) -> None:
    check_gate(LAUNCHERS["fast"], dtype, name, size)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations_stay_in_bounds(launcher: EmulatedLauncher, name: str, dtype: torch.dtype) -> None:
    check_gate(launcher, dtype, name, 1032)


def test_embedding_resolves_last_tokens_zeroes_invalid_ids_and_keeps_given_rows(
    launcher: EmulatedLauncher, dtype: torch.dtype
) -> None:
    check_embedding(launcher, dtype, hidden=72)
    check_embedding(launcher, dtype, hidden=1032)


@pytest.mark.parametrize("dtype_of_rows", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_and_padding_is_not_changed(launcher: EmulatedLauncher, dtype_of_rows: torch.dtype) -> None:
    check_gather(launcher, dtype_of_rows)


def test_rows_of_odd_bytes_are_refused() -> None:
    source = torch.zeros(2, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="24 bytes"):
        make(LAUNCHERS["fast"]).gather_rows(source, ints(0), torch.zeros(1, 12, dtype=torch.bfloat16))


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_pages_are_copied_in_all_layers_and_nothing_else(launcher: EmulatedLauncher, kv_dtype: str) -> None:
    check_page_copies(launcher, kv_dtype)


def test_pages_are_copied_to_a_buffer_of_another_number_of_pages() -> None:
    layout = CacheLayout(2, 6, 16, 1, 64, "fp8")
    cache = torch.randint(0, 256, (2, 6, layout.page_bytes), dtype=torch.uint8)
    host = torch.zeros(2, 3, layout.page_bytes, dtype=torch.uint8)
    copy_pages(LAUNCHERS["fast"], cache, host, ints(5, 0, 1, 2).view(2, 2))
    assert torch.equal(host[:, [0, 2]], cache[:, [5, 1]])
    assert not host[:, 1].any()


# ---- Several residual streams ----


def test_streams_are_predicted_corrected_and_averaged_as_in_float64(dtype: torch.dtype) -> None:
    check_streams(LAUNCHERS["fast"], dtype, 1032)
    check_cut_gates(LAUNCHERS["fast"], dtype, 1032)


def test_kernels_of_streams_depend_on_no_order_of_threads(launcher: EmulatedLauncher) -> None:
    check_streams(launcher, torch.float32, 72)
    check_cut_gates(launcher, torch.bfloat16, 72)


# ---- Unsupported models ----


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((4096, 14336, 128, 128, "q8_0"), None),
        ((4095, 14336, 128, 128, "bf16"), "hidden_size is 4095"),
        ((32768, 14336, 128, 128, "bf16"), "hidden_size is 32768"),
        ((4096, 100, 128, 128, "bf16"), "intermediate_size is 100"),
        ((4096, 14336, 512, 128, "bf16"), "head_dim is 512"),
        ((4096, 14336, 80, 20, "bf16"), "rotary_dim is 20"),
        ((4096, 14336, 80, 80, "q8_0"), "q8_0 cache needs a multiple of 32"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(
    sizes: tuple[int, int, int, int, str], reason: str | None
) -> None:
    found = unsupported_reason(*sizes)
    assert found == reason if reason is None else reason in str(found)


def test_stored_results_do_not_depend_on_the_batch() -> None:
    heads, rope = HeadShape(4, 2, 128), rope_rows(64, 128)
    elementwise = make(LAUNCHERS["fast"], torch.bfloat16, heads, kv_dtype="q8_0", rotary_dim=128, page_size=32)
    layout = CacheLayout(1, 4, 32, 2, 128, "q8_0")
    qkv = torch.randn(6, heads.qkv_size).bfloat16()
    table = torch.arange(4, dtype=torch.int32).view(4, 1)
    results = []
    for tokens, rows in (
        (slice(0, 6), Rows(ints(0, 1, 2, 6), ints(3, 40 - 32, 7), ints(0, 1, 2))),
        (slice(2, 6), Rows(ints(0, 4), ints(7), ints(2))),
    ):
        mine, layer = qkv[tokens].clone(), torch.zeros(layout.num_bytes, dtype=torch.uint8)
        elementwise.rope_and_store(mine, layer, table, rows, rope, None)
        results.append((mine[-4:], layer.view(4, -1)[2]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert np.count_nonzero(results[0][1].numpy())
