"""Steps of whole models and the engine's loop, on the emulated device with tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes, plan_spec
from penstock.tools.gpu import items
from penstock.tools.gpu.checks import pass_agreement
from penstock.tools.gpu.devices.steps import generate
from penstock.tools.gpu.speed import attribution, engine_runs, models
from penstock.tools.gpu.speed.attribution import GpuProfiler, KernelRun
from penstock.tools.random_weights import LLAMA_8B, TINY
from tests.tools.gpu.device_context import NoMemoryCounter, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.tools.gpu.devices.device_context import DeviceContext

TINY_PLAN = models.ModelPlan(
    TINY, ((1, 40), (3, 40)), (70, 40), profiled_rows=(3,), dtype=torch.float32, host_kv_bytes=1 << 20, num_steps=2
)
TINY_LOADS = {
    "users": engine_runs.Load(TINY, 2, 4, 24, 32, 8, 1.5, torch.float32),
    "offline": engine_runs.Load(TINY, 3, 5, 8, 64, dtype=torch.float32),
}


class LaunchProfiler:
    """Each of our kernels takes 5 us and follows the one before after 1 us."""

    def __init__(self, context: DeviceContext) -> None:
        self._device: Any = context.device

    def runs(self, work: Callable[[], object]) -> list[KernelRun]:
        names, graphs = self._device.launcher.launched, self._device.graphs
        before, replays = len(names), [graph.num_replays for graph in graphs]
        work()
        calls = [
            call
            for graph, count in zip(graphs, replays, strict=True)
            for call in graph.calls * (graph.num_replays - count)
        ]
        kernels = [call.arguments[0] for call in calls if call.arguments and isinstance(call.arguments[0], Kernel)]
        launched = [*names[before:], *(kernel.entry for kernel in kernels)]
        return [KernelRun(name, 6.0 * place, 6.0 * place + 5.0) for place, name in enumerate(launched)]


def test_steps_of_a_model_are_timed_and_taken_apart(record: Record, context: DeviceContext) -> None:
    # A captured step of a prompt has padding.
    context = replace(context, choices=replace(context.choices, mixed_tokens=0))
    models.measure(record.results, context, LaunchProfiler(context), "model.x", TINY_PLAN)
    found = record.findings()
    assert {
        "model.x.ready", "model.x.decode.1x40", "model.x.decode.3x40.launch",
        "model.x.prefill.70", "model.x.prefill.40.first_token", "model.x.memory", "model.x.parts.3x40.scan_rows",
    } <= set(found)  # fmt: skip
    assert found["model.x.decode.3x40"].detail.endswith(" tok/s")
    # The last layer computes the last token alone.
    prefill = "model.x.parts.prefill"
    attention = found[f"{prefill}.prefill_attention_wgmma"]
    assert attention.value == 5.0 * (TINY.num_layers - 1)
    assert f"{TINY.num_layers - 1} launches" in attention.detail
    step, gaps = (float(found[f"{prefill}.{name}"].value or 0) for name in ("step", "gaps"))
    assert gaps == pytest.approx(step / 6, rel=0.1)
    assert found[f"{prefill}.late"].value == 0


@pytest.mark.parametrize(("quantize", "kv_dtype"), [("int4", "bf16"), ("fp8", "q8_0")])
def test_steps_of_quantised_models_are_timed(
    record: Record, context: DeviceContext, quantize: str, kv_dtype: str
) -> None:
    plan = replace(TINY_PLAN, decode=((1, 40),), prefill=(40,), profiled_rows=(), dtype=torch.bfloat16)
    plan = replace(plan, quantize=quantize, kv_dtype=kv_dtype)
    models.measure(record.results, context, GpuProfiler(), "model.x", plan)
    few, plain = (
        record.findings()["model.x.decode.1x40"].num_bytes,
        plan_spec(TINY, torch.bfloat16, StepSizes(1, 256, 96)),
    )
    assert 0 < few < 0.65 * plain.weight_bytes


def test_case_that_does_not_fit_the_memory_is_skipped_alone(record: Record, context: DeviceContext) -> None:
    plan = replace(TINY_PLAN, prefill=(40,), profiled_rows=())
    small = plan_spec(TINY, torch.float32, StepSizes(3, 256, 128)).workspace_bytes + (1 << 30) + 200_000
    context = replace(context, memory=NoMemoryCounter(small))
    models.measure(record.results, context, GpuProfiler(), "x", plan)
    found = record.findings()
    assert found["x.decode.3x40"].detail.startswith("not measured: its 12 pages do not fit the 0.0 GB")
    assert found["x.decode.1x40"].num_bytes > 0


def test_least_work_of_a_step_is_the_models() -> None:
    weight_bytes = 2 * 8_030_000_000
    assert models.read_bytes(LLAMA_8B, weight_bytes, 64) == pytest.approx(15.01e9, rel=1e-3)
    assert models.step_flop(LLAMA_8B, 1, 1, 0) == pytest.approx(15.01e9, rel=1e-3)
    assert models.step_flop(LLAMA_8B, 1, 0, 1024) - models.step_flop(LLAMA_8B, 1, 0, 0) == 4 * 1024 * 32 * 4096
    mixed = replace(TINY, experts=Experts(8, 2, 96, normalises=True), layer_has_experts=(True, False))
    all_experts = 2.0 * 8 * 3 * 96 * TINY.hidden_size
    assert models.read_bytes(mixed, 10**9, 1) == pytest.approx(
        10**9 - 2 * TINY.vocab_size * TINY.hidden_size - 0.75 * all_experts
    )
    assert attribution.step_bytes(LLAMA_8B, 64 * 1024)["decode_attention"] == 64 * 1024 * 131_072


def test_gaps_count_once_where_kernels_overlap() -> None:
    runs = [KernelRun("a", 0, 10), KernelRun("b", 4, 6), KernelRun("c", 12, 13), KernelRun("d", 50, 51)]
    assert attribution.gaps_us(runs) == [0.0, 2.0, 37.0]


def test_step_without_kernels_is_a_failure(record: Record) -> None:
    class Blind:
        def runs(self, _work: Callable[[], object]) -> list[KernelRun]:
            return []

    with pytest.raises(ValueError, match="saw no kernel"):
        attribution.record(record.results, Blind(), "x", lambda: None, 1, {})


def test_torchs_profiler_has_the_names_that_are_read() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as made:
        torch.ones(3).sum()
    event = next(iter(made.events() or ()))
    assert event.time_range.end >= event.time_range.start
    assert event.device_type != DeviceType.CUDA
    name = "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasSplitKParams<float>)"
    assert attribution.short_name(name) == "cublasLt::splitKreduce_kernel"


@pytest.mark.parametrize(("load", "facts"), [("users", (".ttft_p50", ".itl_p50", ".itl_p99")), ("offline", ("",))])
@pytest.mark.usefixtures("context")
def test_loads_of_the_engine_are_measured(
    record: Record, monkeypatch: pytest.MonkeyPatch, load: str, facts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(engine_runs, "LOADS", TINY_LOADS)
    engine_runs.run(record.results, items.choose([f"engine.{load}"])[0])
    assert {f"engine.{load}{fact}" for fact in facts} == set(record.findings())


def test_engine_loop_generates_the_same_tokens_as_single_steps(context: DeviceContext) -> None:
    prompt = np.arange(3, 20, dtype=np.int32)
    loop = engine_runs.open_loop(context, engine_runs.Load(TINY, 4, 1, 17, 16, 12, dtype=torch.float32))
    stream = loop.submit(prompt, 12)
    loop.run(lambda: False)
    loop.close()
    forward_pass = pass_agreement._on_gpu(context, TINY, torch.float32, "bf16")
    expected = generate(forward_pass, [prompt], 12, 5)[0]
    assert stream.token_ids == expected.tolist()
    assert len(stream.token_times_s) == 12


def test_failed_step_ends_the_loop_with_its_error(context: DeviceContext) -> None:
    loop = engine_runs.open_loop(context, engine_runs.Load(TINY, 2, 1, 8, 16, 4, dtype=torch.float32))
    loop.submit(np.array([5, 10_000], np.int32), 4)
    with pytest.raises(ValueError, match="token ids are"):
        loop.run(lambda: False)
    loop.close()
