"""The sections ceilings and kernels, on the emulated device with small sizes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.ops.interface import HeadShape
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.results import MATCH_VARIABLE
from penstock.tools.gpu.speed import ceilings, kernel_cases
from penstock.tools.gpu.speed import kernels as kernel_speed
from penstock.tools.gpu.speed.kernel_cases import KernelCase, PreparedCase
from tests.tools.gpu.device_context import Record, make_device_context

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS = HeadShape(4, 2, 64)


def test_ceilings_are_measured(record: Record) -> None:
    sizes = ceilings.CeilingSizes(4096, 32, 3, 4096, 64, CacheLayout(2, 3, 16, 1, 64, "bf16"))
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
        library_rows=(3,),
        peers=(("d", 2, 1, 64), ("p", 1, 32, 32)),
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
    assert found["weights.lm_head.3"].unit == "us"
    assert {found[name].detail[:14] for name in ("peer.d", "peer.p")} == {"not measured: "}
    assert [found[name].unit for name in ("product.int4.1", "product.int8.3", "experts.3")] == ["us", "TB/s", "us"]


def test_match_chooses_the_kernel_cases_that_run(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MATCH_VARIABLE, r"norm\.5$|gate_up\.2")
    sizes = kernel_cases.KernelSizes(
        HEADS, hidden=128, intermediate=64, elementwise_tokens=(5,), library_rows=(2,), cold_bytes=1
    )
    kernel_speed.measure(record.results, make_device_context(), sizes)
    assert {name.rpartition(".")[0] for name in record.findings() if name.endswith("bandwidth")} == {
        "elementwise.norm.5", "weights.gate_up.2",
    }  # fmt: skip


def test_one_case_is_launched_for_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    launched: list[str] = []
    case = KernelCase("x", lambda _: PreparedCase([lambda: launched.append("work")]))

    @contextmanager
    def profiling() -> Iterator[None]:
        launched.append("begin")
        yield
        launched.append("end")

    kernel_speed.run_case(make_device_context(), case, profiling())
    assert launched == ["work", "work", "begin", "work", "work", "work", "end"]
    assert kernel_speed.main(["nothing"]) == 2
    assert "attention.decode.64x1k" in capsys.readouterr().err


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
