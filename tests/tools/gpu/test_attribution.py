"""Steps are taken apart by kernel, on the emulated device with a tiny model and a profiler that records launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._autograd import DeviceType

from penstock.tools.gpu.devices.profiling import KernelRun, short_name
from penstock.tools.gpu.speed import attribution, weight_products
from penstock.tools.gpu.speed.mixed_steps import MixedLoad, compare
from penstock.tools.random_weights import LLAMA_8B, TINY
from tests.tools.gpu.device_context import Record, make_device_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.tools.gpu.devices.device_context import DeviceContext


class LaunchProfiler:
    """Each of our kernels takes 5 us and follows the one before after 1 us."""

    def __init__(self, context: DeviceContext) -> None:
        self._launcher: Any = context.device.launcher

    def runs(self, work: Callable[[], object]) -> list[KernelRun]:
        launched: list[str] = []
        original = self._launcher.launch

        def launch(kernel: Any, grid: Any, *arguments: Any) -> None:
            launched.append(kernel.entry)
            original(kernel, grid, *arguments)

        self._launcher.launch = launch
        try:
            work()
        finally:
            self._launcher.launch = original
        return [KernelRun(name, 6.0 * place, 6.0 * place + 5.0) for place, name in enumerate(launched)]


def test_time_of_a_step_goes_to_its_kernels_and_gaps(record: Record) -> None:
    context = make_device_context()
    plan = attribution.AttributionPlan(
        "tiny", TINY, (2,), tokens=40, prefill_tokens=48, mixed_rows=1, mixed_tokens=(5,), num_steps=2
    )
    attribution.measure(record.results, context, LaunchProfiler(context), plan)
    found = record.findings()
    prefill = "attribution.tiny.prefill.48"
    # The last layer computes the last token alone.
    attention = found[f"{prefill}.prefill_attention_wgmma"]
    assert attention.value == 5.0 * (TINY.num_layers - 1)
    assert f"{TINY.num_layers - 1} launches" in attention.detail
    assert "% of the limit" in found[f"{prefill}.decode_attention"].detail
    step, gaps = (float(found[f"{prefill}.{name}"].value or 0) for name in ("step", "gaps"))
    assert gaps == pytest.approx(step / 6, rel=0.1)
    assert found[f"{prefill}.late"].value == 0
    # The emulated graph replays without launches: what is left is around it.
    assert {"attribution.tiny.2x40.step", "attribution.tiny.2x40.scan_rows"} <= set(found)
    mixed = "attribution.tiny.mixed.1+5"
    assert found[f"{mixed}.single.prefill_attention_wgmma"].value == attention.value
    assert f"{mixed}.captured.prefill_attention_wgmma" not in found
    assert {f"variant.mixed.tiny.1+5.{way}" for way in ("captured", "single")} <= set(found)


def test_mixed_tokens_are_chosen_up_to_the_first_size_at_which_graphs_are_not_faster(record: Record) -> None:
    class TimedLoad(MixedLoad):
        def run(self, _forward_pass: object, prompt_tokens: int, *, is_captured: bool) -> float:
            return {64: 1e-3, 128: 2e-3, 256: 3e-3, 512: 1e-3}[prompt_tokens] if is_captured else 2.5e-3

    load = TimedLoad(8, 1024, 1, 100, 1)
    assert compare(record.results, "x", load, None, (64, 128, 256, 512)) == 128  # type: ignore[arg-type]
    assert compare(record.results, "x", load, None, (256, 512)) == 0  # type: ignore[arg-type]
    assert record.findings()["variant.mixed.x.8+128.captured"].value == 2.0


def test_gaps_count_once_where_kernels_overlap() -> None:
    runs = [KernelRun("a", 0, 10), KernelRun("b", 4, 6), KernelRun("c", 12, 13), KernelRun("d", 50, 51)]
    assert attribution._gaps_us(runs) == [0.0, 2.0, 37.0]


def test_step_without_kernels_is_a_failure(record: Record) -> None:
    class Blind:
        def runs(self, _work: Callable[[], object]) -> list[KernelRun]:
            return []

    with pytest.raises(ValueError, match="saw no kernel"):
        attribution._record(record.results, Blind(), "x", lambda: None, 1, {})


def test_bytes_of_a_step_are_those_of_the_model() -> None:
    num_bytes = attribution.step_bytes(LLAMA_8B, 64 * 1024)
    assert num_bytes["library"] == pytest.approx(15.01e9, rel=1e-3)
    assert num_bytes["decode_attention"] == 64 * 1024 * 131_072
    fused = ("multiply_and_store", "multiply_and_add", "multiply_and_gate", "lm_head")
    assert sum(num_bytes[name] for name in fused) == num_bytes["library"]


def test_each_weight_has_times_and_kernel_names(record: Record) -> None:
    class Named:
        def runs(self, work: Callable[[], object]) -> list[KernelRun]:
            work()
            return [KernelRun("nvjet_tst_64x8", 0, 1), KernelRun("splitKreduce_kernel", 1, 2)]

    sizes = weight_products.WeightSizes((("o", 48, 32), ("lm_head", 96, 32)), (1, 3), 10_000)
    weight_products.measure(record.results, make_device_context(), Named(), sizes)
    found = record.findings()
    assert {"weights.o.1", "weights.lm_head.3"} <= set(found)
    assert found["weights.o.3"].detail.endswith("; nvjet_tst_64x8, splitKreduce_kernel")


def test_short_names_have_no_types_and_parameters() -> None:
    assert short_name("void cublasLt::splitKreduce_kernel<32, 16, int>(cublasSplitKParams<float>)") == (
        "cublasLt::splitKreduce_kernel"
    )
    assert short_name("decode_attention") == "decode_attention"


def test_torchs_profiler_has_the_names_that_are_read() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as made:
        torch.ones(3).sum()
    event = next(iter(made.events() or ()))
    assert event.time_range.end >= event.time_range.start
    assert event.device_type != DeviceType.CUDA
