"""Steps are taken apart by kernel, on the emulated device with a tiny model and a profiler that records launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._autograd import DeviceType

from penstock.tools.gpu.devices.profiling import KernelRun, short_name
from penstock.tools.gpu.speed import attribution, end_to_end
from penstock.tools.gpu.speed.engine_runs import EnginePlan
from penstock.tools.random_weights import LLAMA_8B, TINY
from tests.tools.gpu.device_context import Record, make_device_context
from tests.tools.gpu.test_engine_speed import tiny_plan

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
    plan = tiny_plan(engine=EnginePlan(num_concurrent=0), profiled=("3x1k", "2k"))
    end_to_end.measure_model(record.results, context, LaunchProfiler(context), plan)
    found = record.findings()
    prefill = "attribution.llama8b.prefill.2k"
    # The last layer computes the last token alone.
    attention = found[f"{prefill}.prefill_attention_wgmma"]
    assert attention.value == 5.0 * (TINY.num_layers - 1)
    assert f"{TINY.num_layers - 1} launches" in attention.detail
    assert "TB/s" in found[f"{prefill}.decode_attention"].detail
    step, gaps = (float(found[f"{prefill}.{name}"].value or 0) for name in ("step", "gaps"))
    assert gaps == pytest.approx(step / 6, rel=0.1)
    assert found[f"{prefill}.late"].value == 0
    assert "attribution.llama8b.3x1k.step" in found


def test_gaps_count_once_where_kernels_overlap() -> None:
    runs = [KernelRun("a", 0, 10), KernelRun("b", 4, 6), KernelRun("c", 12, 13), KernelRun("d", 50, 51)]
    assert attribution._gaps_us(runs) == [0.0, 2.0, 37.0]


def test_step_without_kernels_is_a_failure(record: Record) -> None:
    class Blind:
        def runs(self, _work: Callable[[], object]) -> list[KernelRun]:
            return []

    with pytest.raises(ValueError, match="saw no kernel"):
        attribution.record(record.results, Blind(), "x", lambda: None, 1, {})


def test_bytes_of_a_step_are_those_of_the_model() -> None:
    num_bytes = attribution.step_bytes(LLAMA_8B, 64 * 1024)
    assert num_bytes["library"] == pytest.approx(15.01e9, rel=1e-3)
    assert num_bytes["decode_attention"] == 64 * 1024 * 131_072
    fused = ("multiply_and_store", "multiply_and_add", "multiply_and_gate", "lm_head")
    assert sum(num_bytes[name] for name in fused) == num_bytes["library"]


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
