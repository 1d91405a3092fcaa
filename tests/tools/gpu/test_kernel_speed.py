"""The sections ceilings and kernels, on the emulated device with small sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.attention import SDPBackend

from penstock.backend.checkpoint.decoder_config import Experts
from penstock.backend.passes.decoder.cuda.device.kernel_choices import ALLOWED, CONSTANTS
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout
from penstock.backend.passes.decoder.ops import HeadShape
from penstock.tools.gpu.cases.attention.choices import DECODE_VARIANTS
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.reporting.choices import record_choice, record_smallest
from penstock.tools.gpu.speed import attention_peers, ceilings, kernel_cases, product_rows, variants
from penstock.tools.gpu.speed import kernels as kernel_speed
from penstock.tools.random_weights import TINY
from tests.tools.gpu.device_context import Record, make_device_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEADS = HeadShape(4, 2, 64)


def test_ceilings_are_measured(record: Record) -> None:
    sizes = ceilings.CeilingSizes(4096, 32, (64, 32), 3, 4096, 64, CacheLayout(2, 3, 16, 1, 64, "bf16"))
    ceilings.measure(record.results, make_device_context(), sizes)
    found = record.findings()
    assert {"ceiling.copy", "ceiling.product", "ceiling.graph_node", "link.to_device"} <= set(found)
    assert {"link.pages.save", "link.pages.restore"} <= set(found)


def test_each_kernel_has_a_figure(record: Record) -> None:
    sizes = kernel_cases.KernelSizes(
        heads=HEADS,
        decode=tuple(
            (f"{rows}.{kv_dtype}", rows, 40, kv_dtype)
            for rows in (1, 2)
            for kv_dtype in ("bf16", "q8_0", "fp8", "fp32")
        ),
        prefill=(("a", 0, 40, "bf16"), ("b", 40, 9, "q8_0"), ("c", 0, 9, "fp8")),
        encoder=(("a", 2, 9, None), ("b", 1, 40, 8)),
        encoder_heads=1,
        sampling_rows=3,
        vocab_size=300,
        elementwise_tokens=(5,),
        hidden=128,
        intermediate=64,
        product_rows=(1, 3),
        fused_rows=(3,),
        experts=Experts(4, 2, 32, normalises=True),
        expert_hidden=64,
        expert_tokens=(3,),
        cold_bytes=50_000,
        with_peers=False,
    )
    kernel_speed.measure(record.results, make_device_context(), sizes)
    found = record.findings()
    assert found["attention.decode.1.bf16"].unit == "us"
    assert found["attention.decode.2.q8_0"].unit == "TB/s"
    assert {
        "attention.prefill.b",
        "attention.encoder.b",
        "sampling.256x128k.filtered",
        "elementwise.rope_and_store.q8_0.5",
    } <= set(found)
    assert {f"product.bf16.{name}.3.bandwidth" for name in ("qkv", "o", "gate_up", "down")} <= set(found)
    assert [found[name].unit for name in ("product.int4.1", "product.int8.3", "experts.3")] == ["us", "TB/s", "us"]


class TimesInOrder:
    """A clock that runs each work once and returns the next of the given times."""

    def __init__(self, *times_us: float) -> None:
        self._times_us = iter(times_us)

    def work_us(self, variants: Sequence[Callable[[], object]]) -> float:
        variants[0]()
        return next(self._times_us)

    def once_us(self, _work: Callable[[], object]) -> float:
        raise NotImplementedError


def test_fastest_variant_is_named_with_what_the_others_cost(record: Record) -> None:
    """The second choice is the fastest in both cases."""
    sizes = kernel_cases.KernelSizes(heads=HEADS, decode=(("a", 2, 40, "bf16"), ("b", 1, 70, "bf16")), cold_bytes=1)
    context = replace(make_device_context(), clock=TimesInOrder(8.0, 30.0, 4.0, 20.0, 5.0, 22.0))
    choices, cases = DECODE_VARIANTS["chunk_tokens"], kernel_cases.kernel_cases(sizes)[:2]
    variants._compare(record.results, context, "chunk_tokens", choices, cases)
    found = record.findings()
    assert found["variant.chunk_tokens"].value == 256
    assert found["variant.chunk_tokens"].detail == (
        "128: 75.0 % slower than the best, 256: 0.0 % slower than the best, 512: 17.5 % slower than the best"
    )
    assert found["variant.chunk_tokens.512.attention.decode.b"].value == 22.0


def test_every_variant_of_attention_is_timed(record: Record) -> None:
    """No clock: each runs once on the emulator, and all take equally long, so the constants stay."""
    sizes = kernel_cases.KernelSizes(
        heads=HEADS, decode=(("1x1k", 1, 40, "bf16"),), prefill=(("1k", 0, 20, "bf16"),), cold_bytes=1
    )
    variants.measure(record.results, replace(make_device_context(), clock=TimesInOrder(*[1.0] * 99)), sizes)
    found = record.findings()
    of_kernels = ALLOWED.keys() - {"step_tokens", "mixed_tokens", "product_rows", "small_product_rows"}
    assert {name: found[f"variant.{name}"].value for name in of_kernels} == {
        name: getattr(CONSTANTS, name) for name in of_kernels
    }
    assert "variant.query_rows+key_tokens+wgmma.64+32+0.attention.prefill.1k" in found


def test_a_choice_replaces_the_constant_only_if_it_gains_enough(record: Record) -> None:
    times = {"128+64": [100.0, 50.0], "64+64": [99.0, 49.5], "64+32": [120.0, 60.0]}
    record_choice(record.results, "query_rows+key_tokens", "128+64", times)
    assert record.findings()["variant.query_rows"].value == 128
    record_choice(record.results, "query_rows+key_tokens", "128+64", times | {"64+32": [90.0, 49.0]})
    found = record.findings()
    assert [found[f"variant.{name}"].value for name in ("query_rows", "key_tokens")] == [64, 32]
    record_smallest(record.results, "step_tokens", {512: 1.2, 1024: 1.04, 2048: 1.0, 4096: 1.01})
    assert record.findings()["variant.step_tokens"].value == 1024


def test_steps_of_few_rows_are_timed_with_products_of_ours_and_of_the_library(record: Record) -> None:
    plan = product_rows.RowPlan("tiny", "small_product_rows", TINY, (1, 2), tokens=40, num_steps=2)
    product_rows.measure(record.results, make_device_context(), plan)
    found = record.findings()
    timed = {f"variant.small_product_rows.tiny.{rows}x40.{way}" for rows in (1, 2) for way in ("ours", "library")}
    assert timed | {"variant.small_product_rows"} == set(found)


@pytest.mark.parametrize(
    ("ours", "chosen"),
    [
        ({1: 0.9, 4: 1.0, 8: 1.01, 16: 1.02, 32: 1.0}, 32),
        ({1: 0.9, 4: 1.0, 8: 1.03, 16: 0.9, 32: 0.9}, 4),
        ({1: 1.5, 4: 0.9, 8: 0.9}, 0),
    ],
)
def test_our_products_take_rows_up_to_the_first_number_at_which_they_are_slower(
    record: Record, ours: dict[int, float], chosen: int
) -> None:
    product_rows.record_most_rows(record.results, "product_rows", ours, dict.fromkeys(ours, 1.0))
    found = record.findings()["variant.product_rows"]
    assert found.value == chosen
    assert chosen in ALLOWED["product_rows"]
    assert found.detail.startswith(f"time of ours against the library's by rows: 1: {100 * (ours[1] - 1):+.1f} %, 4: ")


def test_attention_peers_are_measured_or_skipped_with_a_reason(record: Record) -> None:
    attention_peers.measure(
        record.results, make_device_context(), HEADS, (("d", 2, 64),), (("p", 32),),
        {"math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION}, 1,
    )  # fmt: skip
    found = record.findings()
    assert {"peer.math.decode.d", "peer.math.prefill.p", "peer.flex.prefill.p"} <= set(found)
    assert found["peer.cudnn.decode.d"].detail.startswith("not measured: ")
    assert "flash_attn_interface" in found["peer.fa3"].detail


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0", "fp8"])
def test_caches_are_filled_with_finite_numbers(kv_dtype: str) -> None:
    layout = CacheLayout(2, 3, 16, 2, 64, kv_dtype)
    cache = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
    fill_cache(cache, layout)
    numbers = cache.view(-1, layout.block_bytes)
    if kv_dtype == "q8_0":
        scales = numbers[:, 16 * 64 :].contiguous().view(torch.float16)
        assert ((scales >= 0) & (scales < 0.03)).all()
    else:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kv_dtype]
        assert numbers.view(dtype).float().isfinite().all()
