"""The section end-to-end, on the emulated device with a tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes, plan_spec
from penstock.tools.gpu.checks import pass_agreement
from penstock.tools.gpu.devices.profiling import GpuProfiler
from penstock.tools.gpu.devices.steps import generate
from penstock.tools.gpu.speed import end_to_end, engine_runs
from penstock.tools.random_weights import TINY, RandomWeights
from tests.tools.gpu.device_context import NoMemoryCounter, Record, make_device_context


def tiny_plan(**changes: Any) -> end_to_end.ModelPlan:
    engine = engine_runs.EnginePlan(
        users=2, user_prompt_tokens=24, user_new_tokens=4, user_batch_tokens=32, user_s=3.0, requests=3, shortest=5,
        longest=8, batch_tokens=64, num_concurrent=2, concurrent_prompt_tokens=9, concurrent_new_tokens=12,
    )  # fmt: skip
    plan = end_to_end.ModelPlan(
        "llama8b",
        TINY,
        (("bf16", "1x1k", 1, 40), ("bf16", "3x1k", 3, 40), ("q8_0", "3x1k.q8_0", 3, 40)),
        (("1k", 40), ("2k", 70)),
        engine,
        ttft_tokens=40,
        num_steps=2,
        dtype=torch.float32,
        host_kv_bytes=1 << 20,
    )
    return replace(plan, **changes)


def test_model_is_measured_from_end_to_end(record: Record) -> None:
    context = make_device_context()
    end_to_end.measure_model(record.results, context, GpuProfiler(), tiny_plan())
    found = record.findings()
    assert {
        "llama8b.decode.1x1k", "llama8b.decode.3x1k.q8_0", "llama8b.decode.3x1k.device", "llama8b.prefill.2k",
        "llama8b.ttft.1k", "llama8b.memory", "llama8b.mixed.ttft_p50", "llama8b.mixed.itl_p99_ratio",
        "llama8b.bf16.host_pages", "llama8b.bf16.host_pages.copy", "llama8b.q8_0.host_pages.compute",
        "llama8b.offline", "llama8b.engine.plan_p50", "llama8b.engine.plan_p99",
    } <= set(found)  # fmt: skip


def test_a_case_that_does_not_fit_the_memory_is_skipped_alone(record: Record) -> None:
    plan = tiny_plan(engine=engine_runs.EnginePlan(num_concurrent=0))
    small = plan_spec(TINY, torch.float32, StepSizes(3, 256, 128)).workspace_bytes + (1 << 30) + 200_000
    context = replace(make_device_context(), memory=NoMemoryCounter(small))
    end_to_end.measure_model(record.results, context, GpuProfiler(), plan)
    found = record.findings()
    assert found["llama8b.decode.3x1k"].detail.startswith("not measured: its cache of 0.0 GB does not fit the ")
    assert {found[f"llama8b.{name}"].unit for name in ("decode.1x1k", "prefill.2k")} == {"tok/s"}


def test_engine_loop_generates_the_same_tokens_as_single_steps(record: Record) -> None:
    context, weights = make_device_context(), RandomWeights(TINY, torch.float32, torch.device("cpu"))
    plan = engine_runs.EnginePlan()
    runs = engine_runs._EngineRuns(record.results, context, "x", TINY, weights, torch.float32, plan)
    prompt = np.arange(3, 20, dtype=np.int32)
    loop = runs._open(engine_runs._sizes(4, 16, 40))
    stream = loop.submit(prompt, 12)
    loop.run(lambda: False)
    loop.close()
    forward_pass = pass_agreement._on_gpu(context, TINY, torch.float32, "bf16")
    expected = generate(forward_pass, [prompt], 12, 5)[0]
    assert stream.token_ids == expected.tolist()
    assert len(stream.token_times_s) == 12


def test_failed_step_ends_the_loop_with_its_error(record: Record) -> None:
    weights = RandomWeights(TINY, torch.float32, torch.device("cpu"))
    runs = engine_runs._EngineRuns(
        record.results, make_device_context(), "x", TINY, weights, torch.float32, engine_runs.EnginePlan()
    )
    loop = runs._open(engine_runs._sizes(2, 16, 40))
    loop.submit(np.array([5, 10_000], np.int32), 4)
    with pytest.raises(ValueError, match="token ids are"):
        loop.run(lambda: False)
    loop.close()
