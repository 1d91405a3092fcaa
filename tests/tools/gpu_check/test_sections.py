"""Every section of gpu-check, rehearsed small on the emulated device: that they run, not what they find."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from penstock.backend.passes.decoder.cuda import kernel_manifest
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout
from penstock.backend.passes.decoder.cuda.workspace_plan import StepSizes
from penstock.backend.passes.decoder.ops import HeadShape
from penstock.tools.gpu_check.cases.catalogue import Check, small_checks
from penstock.tools.gpu_check.cases.comparing import Mismatch
from penstock.tools.gpu_check.checks import (
    compilation,
    correctness,
    deterministic_passes,
    environment,
    invariance,
    invariance_child,
    pass_agreement,
    sanitizer,
    sanitizer_child,
    sharing,
)
from penstock.tools.gpu_check.devices.models import LLAMA_8B, QWEN3_06B, TINY, RandomWeights
from penstock.tools.gpu_check.devices.random_caches import fill_cache
from penstock.tools.gpu_check.devices.steps import generate
from penstock.tools.gpu_check.peers import attention as attention_peers
from penstock.tools.gpu_check.peers import transformers_batching as peers
from penstock.tools.gpu_check.speed import ceilings, end_to_end, engine_runs, host_pages, kernel_cases, kernel_speed
from tests.cuda_emulator import EmulatedLauncher
from tests.shm.buffers.fake_device import FakeDevice
from tests.tools.gpu_check.device_context import Record, make_lab

if TYPE_CHECKING:
    from penstock.backend.passes.decoder.cuda.device.launcher import Launcher

HEADS = HeadShape(4, 2, 64)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path)


def test_the_environment_without_a_gpu_is_said_to_have_none(record: Record) -> None:
    environment.run(record.results)
    with pytest.raises(AssertionError, match="torch finds no CUDA device"):
        record.findings()
    assert environment.describe_environment()["torch"] == torch.__version__


def test_compilation_has_a_figure_for_each_architecture(record: Record) -> None:
    kernels = [kernel for kernel in kernel_manifest.kernels() if kernel.source in ("norms.cu", "step.cu")]
    compilation.compile_for(record.results, kernels, ["sm_80", "sm_90"], 2)
    found = record.findings()
    assert found["compile.sm_90.kernels"].value == len(kernels)
    assert found["compile.sm_80.no_spills"].passed
    assert "add_rms_norm" in str(found["compile.sm_90.registers"].value)


def test_ceilings(record: Record) -> None:
    sizes = ceilings.Sizes(4096, 32, (64, 32), 3, 4096, 64, CacheLayout(2, 3, 16, 1, 64, "bf16"))
    ceilings.measure(record.results, make_lab(), sizes)
    found = record.findings()
    assert {"ceiling.copy", "ceiling.product", "ceiling.graph_node", "link.to_device"} <= set(found)
    assert {"link.pages.save", "link.pages.restore"} <= set(found)


def test_a_family_is_one_finding_and_a_failed_check_another(record: Record, tmp_path: Path) -> None:
    def fail(_launcher: Launcher) -> None:
        raise Mismatch("3 of 4 bytes differ")

    checks = [
        Check("norm", "good", lambda _launcher: 0.25),
        Check("norm", "bad", fail),
        Check("ptx", "x", lambda _: None),
    ]
    correctness.run_checks(record.results, EmulatedLauncher(), checks)
    lines = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    by_name = {line["name"]: line for line in lines}
    assert by_name["norm.bad"]["detail"].startswith("Mismatch: 3 of 4 bytes differ")
    assert (by_name["correctness.norm"]["passed"], by_name["correctness.norm"]["value"]) == (False, 0.25)
    assert by_name["correctness.ptx"]["passed"]


def test_checks_end_with_their_time(tmp_path: Path) -> None:
    record = Record(tmp_path, 5.0)
    correctness.run_checks(record.results, EmulatedLauncher(), [Check("norm", "x", lambda _: None)], keeps_s=10.0)
    with pytest.raises(AssertionError, match="0 of 1 passed"):
        record.findings()


def test_passes_agree_with_the_cpus(record: Record) -> None:
    pass_agreement.check_passes(record.results, make_lab(), ("qwen3", "phi3-partial"))
    findings = record.findings()
    assert findings["pass.qwen3.tokens"].passed
    assert findings["pass.qwen3.embeddings"].passed


def test_kernels_have_figures(record: Record) -> None:
    sizes = kernel_cases.Sizes(
        heads=HEADS,
        decode=tuple(
            (f"{rows}.{kv_dtype}", rows, 40, kv_dtype)
            for rows in (1, 2)
            for kv_dtype in ("bf16", "q8_0", "fp8", "fp32")
        ),
        prefill=(("a", 0, 40, "bf16"), ("b", 40, 9, "q8_0"), ("c", 0, 9, "fp8")),
        sampling_rows=3,
        vocab_size=300,
        elementwise_tokens=(5,),
        hidden=64,
        intermediate=64,
        cold_bytes=50_000,
        with_peers=False,
    )
    kernel_speed.measure(record.results, make_lab(), sizes)
    found = record.findings()
    assert found["attention.decode.1.bf16"].unit == "us"
    assert found["attention.decode.2.q8_0"].unit == "TB/s"
    assert {"attention.prefill.b", "sampling.256x128k.filtered", "elementwise.rope_and_store.q8_0.5"} <= set(found)


def test_peers_of_attention_are_measured_or_skipped_with_a_reason(record: Record) -> None:
    attention_peers.measure(
        record.results, make_lab(), HEADS, (("d", 2, 64),), (("p", 32),),
        {"math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION},
    )  # fmt: skip
    found = record.findings()
    assert {"peer.math.decode.d", "peer.math.prefill.p"} <= set(found)
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


# ---- Whole models ----


def tiny_plan(**changes: Any) -> end_to_end.ModelPlan:
    engine = engine_runs.EnginePlan(
        users=3, user_prompt=24, user_tokens=8, user_batch_tokens=32, user_s=1.0, requests=6, shortest=5, longest=12,
        batch_tokens=64, crowd=4, crowd_prompt=9, crowd_tokens=24, is_judged=True,
    )  # fmt: skip
    plan = end_to_end.ModelPlan(
        "llama8b",
        TINY,
        (("bf16", "1x1k", 1, 40), ("bf16", "3x1k", 3, 40), ("q8_0", "3x1k.q8_0", 3, 40)),
        (("1k", 40), ("2k", 70)),
        engine,
        ttft_tokens=40,
        num_steps=3,
        dtype=torch.float32,
        host_kv_bytes=1 << 20,
    )
    return replace(plan, **changes)


def test_a_model_is_measured_from_end_to_end(record: Record) -> None:
    end_to_end.measure_model(record.results, make_lab(), tiny_plan())
    found = record.findings()
    assert {
        "llama8b.decode.1x1k", "llama8b.decode.3x1k.q8_0", "llama8b.decode.3x1k.device", "llama8b.prefill.2k",
        "llama8b.ttft.1k", "llama8b.memory", "llama8b.mixed.ttft_p50", "llama8b.mixed.itl_p99_ratio",
        "llama8b.bf16.host_pages", "llama8b.bf16.host_pages.copy", "llama8b.q8_0.host_pages.compute",
        "llama8b.offline", "engine.plan_p50", "engine.plan_p99", "engine.gpu_idle",
    } <= set(found)  # fmt: skip
    ratio = found["kv.q8_0_tokens_ratio"].value
    assert isinstance(ratio, float)
    assert 1.85 < ratio < 1.9


def test_the_engines_loop_gives_the_tokens_of_steps_by_themselves(record: Record) -> None:
    lab, weights = make_lab(), RandomWeights(TINY, torch.float32, torch.device("cpu"))
    plan = engine_runs.EnginePlan()
    runs = engine_runs._Runs(record.results, lab, "x", TINY, weights, torch.float32, plan)
    prompt = np.arange(3, 20, dtype=np.int32)
    loop = runs._open(engine_runs._sizes(4, 16, 40))
    sequences = loop._streams
    stream = loop.submit(prompt, 12)
    (sequence,) = sequences
    loop.run(lambda: False)
    loop.close()
    forward_pass = pass_agreement._on_gpu(lab, TINY, torch.float32, "bf16")
    expected = generate(forward_pass, [prompt], 12, 5)[0]
    assert sequence.tokens[17:].tolist() == expected.tolist()
    assert len(stream.token_times_s) == 12


def test_a_step_that_fails_ends_the_loop_with_its_error(record: Record) -> None:
    weights = RandomWeights(TINY, torch.float32, torch.device("cpu"))
    runs = engine_runs._Runs(record.results, make_lab(), "x", TINY, weights, torch.float32, engine_runs.EnginePlan())
    loop = runs._open(engine_runs._sizes(2, 16, 40))
    loop.submit(np.array([5, 10_000], np.int32), 4)
    with pytest.raises(ValueError, match="token ids are"):
        loop.run(lambda: False)
    loop.close()


# ---- Invariance ----


def test_passes_with_deterministic_keep_a_rows_bits(record: Record) -> None:
    lab, companies = make_lab(), deterministic_passes.COMPANIES
    small = tuple(replace(company, num_rows=min(company.num_rows, 9), row=company.row % 9) for company in companies)
    deterministic_passes.check_products(record.results, lab, {"o": (64, 32, 2)}, torch.float32)
    sizes = deterministic_passes.Sizes(TINY, torch.float32, ("bf16", "q8_0"), small, new_tokens=4)
    deterministic_passes.check_passes(record.results, lab, sizes)
    found = record.findings()
    assert found["invariance.blocks.o"].passed
    for kv_dtype in ("bf16", "q8_0"):
        for name in ("few", "blocks", "chunks", "tokens", "beside_decodes"):
            finding = found[f"invariance.deterministic.{kv_dtype}.{name}"]
            assert finding.detail == "4 of 4 tokens have the same logits as alone"
        assert found[f"invariance.deterministic.{kv_dtype}.recomputed"].passed


def test_a_pass_whose_bits_depend_on_the_company_fails(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pass that was not asked to be deterministic."""
    monkeypatch.setattr(deterministic_passes, "StepSizes", lambda *sizes, **_: StepSizes(*sizes))
    companies = (deterministic_passes.Company("tokens", 3, 1, 1, 1),)
    sizes = deterministic_passes.Sizes(TINY, torch.float32, ("bf16",), companies, new_tokens=2)
    deterministic_passes.check_passes(record.results, make_lab(), sizes)
    with pytest.raises(AssertionError, match=r"bf16\.recomputed.*bf16\.tokens', '0 of 2 tokens"):
        record.findings()


def test_the_cost_of_deterministic_is_told_beside_the_steps_times(record: Record) -> None:
    sizes = deterministic_passes.CostSizes(TINY, torch.float32, (1, 3), context_tokens=40, prefill_tokens=48)
    deterministic_passes.measure_cost(record.results, make_lab(), sizes)
    found = record.findings()
    for name in ("decode.1x40", "decode.3x40", "prefill.48"):
        assert "ms with --deterministic, " in found[f"invariance.deterministic.cost.{name}"].detail


def test_the_child_compares_rows_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = invariance_child.Sizes(
        {"o": (64, 32, 2), "lm_head": (200, 32, 1)}, (2, 7), (1, 2), 10_000, TINY, torch.float32, 9, 4, (1, 3)
    )
    invariance_child.measure(make_lab(), sizes, until_s=1e12)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told["differing"]) == {"o", "lm_head"}
    assert told["step_us"]["2"] > 0
    assert told["tokens"] == {"same": True, "detail": "1 of 1 rows alike in batches of 1 and 3"}


def test_settings_are_compared_and_their_cost_is_the_largest(record: Record) -> None:
    script = """
import json, os
slow = 1.5 if "CUBLASLT_WORKSPACE_SIZE" in os.environ else 1
differing, step_us = {"qkv": [] if slow > 1 else [7]}, {"1": 10 * slow, "64": 20}
print(json.dumps({"differing": differing, "step_us": step_us, "tokens": {"same": slow > 1, "detail": "told"}}))
"""
    invariance.compare_settings(record.results, [sys.executable, "-c", script])
    found = record.findings()
    assert found["invariance.cost"].value == pytest.approx(50)
    assert "7 rows" in str(found["invariance.default.product.qkv"].value)
    assert found["invariance.invariant.product.qkv"].passed
    assert found["invariance.invariant.tokens"].passed


def test_a_setting_whose_child_dies_is_a_failed_check(record: Record) -> None:
    invariance.compare_settings(record.results, [sys.executable, "-c", "raise SystemExit('no GPU')"])
    with pytest.raises(AssertionError, match="no GPU"):
        record.findings()


# ---- The sanitizer ----

TOOL = sanitizer.Tool("memcheck", 0.5)


def fake_sanitizer(tmp_path: Path, script: str) -> str:
    path = tmp_path / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "passed", "detail"),
    [
        ("print('checked 9 of 9; failed: none'); print('========= ERROR SUMMARY: 0 errors')", True, "checked 9 of 9"),
        ("print('========= Invalid __global__ write'); sys.exit(97)", False, "Invalid __global__ write"),
        ("print('checked 9 of 9; failed: x\\n========= ERROR SUMMARY: 0 errors'); sys.exit(1)", False, "status 1"),
        (
            "print('checked 0 of 9; failed: none'); print('========= ERROR SUMMARY: 0 errors')",
            None,
            "no check was begun",
        ),
        ("print('========= Error: Device not supported.'); sys.exit(255)", None, "not measured: the tool does not run"),
    ],
)
def test_what_the_sanitizer_says_becomes_a_finding(
    tmp_path: Path, script: str, passed: bool | None, detail: str
) -> None:
    record = Record(tmp_path)
    sanitizer.run_tool(record.results, fake_sanitizer(tmp_path, script), TOOL, ["true"])
    line = json.loads((tmp_path / "findings.jsonl").read_text())
    assert line["passed"] is passed
    assert detail in line["detail"]


def test_the_sanitizers_child_launches_every_kernel_source(capsys: pytest.CaptureFixture[str]) -> None:
    sources: set[str] = set()

    class Noting(EmulatedLauncher):
        def launch(self, kernel: Any, grid: Any, *arguments: Any) -> None:
            sources.add(kernel.source)
            super().launch(kernel, grid, *arguments)

    assert sanitizer_child.run_small_checks(Noting(), small_checks(), float("inf")) == 0
    assert "failed: none" in capsys.readouterr().out
    # The page table's changes have no case of their own: whole passes run them.
    assert {kernel.source for kernel in kernel_manifest.kernels()} - sources == {"step.cu"}


def test_the_sanitizers_child_ends_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer_child.run_small_checks(EmulatedLauncher(), small_checks(), 0.0) == 0
    assert "checked 0 of" in capsys.readouterr().out


# ---- Sharing ----


def test_kernels_and_products_are_captured_together(record: Record) -> None:
    sharing.check_graph(record.results, make_lab())
    assert record.findings()["sharing.graph"].passed


class OneMemory(FakeDevice):
    """The emulated GPU's memory is the host's."""

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        self._check_registered(address, num_bytes)
        ctypes.memmove(destination, address, num_bytes)


def test_a_registered_memfd_is_read_in_place(record: Record, tmp_path: Path) -> None:
    device = OneMemory(tmp_path)
    sharing.check_host_registration(record.results, make_lab(), device, 1 << 16)
    assert record.findings()["sharing.host"].passed
    assert not device.registered


def test_pages_go_to_the_host_and_back(record: Record) -> None:
    lab = make_lab()
    host_pages.check_pool(record.results, lab)
    assert record.findings()["sharing.host_pages"].passed
    assert [memory.is_free for memory in lab.device.host_memories] == [True]  # type: ignore[attr-defined]


def test_pages_that_come_back_changed_are_found(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages.page_copies, "copy_pages", lambda *_arguments, **_keywords: None)
    with pytest.raises(Mismatch, match="what the host sees: "):
        host_pages.check_pool(record.results, make_lab())


class CopyingFakeDevice(FakeDevice):
    """Copies out of the host's tensors, which stand for the GPU's."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.poke(destination, ctypes.string_at(source, num_bytes))


def test_another_process_reads_our_buffers(record: Record, tmp_path: Path) -> None:
    device = CopyingFakeDevice(tmp_path)
    script = f"""
import json, sys
from pathlib import Path
from tests.shm.buffers.fake_device import FakeDevice
from penstock.tools.gpu_check.checks.sharing import Handles
from penstock.tools.gpu_check.checks.sharing_peer import read_sums
print(json.dumps(read_sums(Handles(**json.load(sys.stdin)), lambda uuid: FakeDevice(Path({str(tmp_path)!r})))))
"""
    sharing.check_ipc(record.results, make_lab(), device, [sys.executable, "-c", script])
    assert record.findings()["sharing.ipc"].passed
    assert device.num_allocated == 0


def test_a_peer_that_fails_is_told_with_its_last_words(record: Record, tmp_path: Path) -> None:
    device = CopyingFakeDevice(tmp_path)
    with pytest.raises(RuntimeError, match="no usable CUDA driver"):
        sharing.check_ipc(record.results, make_lab(), device, sharing._PEER)
    assert device.num_allocated == 0


# ---- Peers ----


def test_transformers_model_has_our_weights() -> None:
    transformers = pytest.importorskip("transformers")
    weights = RandomWeights(TINY, torch.float32, torch.device("cpu"))
    model = peers.make_model(transformers, TINY, weights, torch.float32, torch.device("cpu"))
    forward_pass = pass_agreement._on_cpu(TINY)
    ours = torch.from_numpy(pass_agreement._last_logits(forward_pass, TINY))
    prompts = torch.tensor(np.stack(pass_agreement._prompts(TINY))).long()
    with torch.inference_mode():
        theirs = model(prompts).logits[:, -1].double()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_transformers_and_ours_are_measured_on_the_same_weights(record: Record) -> None:
    pytest.importorskip("transformers")
    sizes = peers.Sizes(TINY, torch.float32, rows=3, prompt_tokens=20, new_tokens=8, batch_tokens=256)
    peers.measure(record.results, make_lab(), sizes)
    found = record.findings()
    assert {"peers.ours", "peers.transformers_sdpa", "peers.transformers_sdpa_ratio"} <= set(found)
    assert found["peers.transformers_fa3_ratio"].detail.startswith("not measured: ")


@pytest.mark.parametrize(
    ("fields", "name", "options"),
    [
        (("block_size", "num_blocks"), "paged|sdpa", {"block_size": 256, "num_blocks": 96}),
        (
            ("page_size", "block_size", "auto_switch_to_flash"),
            "sdpa",
            {"page_size": 256, "auto_switch_to_flash": False},
        ),
    ],
)
def test_sdpa_is_asked_for_by_the_name_that_each_version_keeps_it_by(
    monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], name: str, options: dict[str, object]
) -> None:
    """5.17 has blocks, and takes FlashAttention for SDPA unless it is called paged; later versions have pages."""
    kind = dataclasses.make_dataclass("Config", [(field, object, None) for field in fields])
    monkeypatch.setattr(peers, "_options_class", lambda: kind)
    names: list[str] = []
    given: list[dict[str, object]] = []

    def generate_batch(inputs: object, generation_config: object, continuous_batching_config: Any) -> dict[str, object]:
        given.append({field: value for field, value in vars(continuous_batching_config).items() if value is not None})
        return {}

    model = SimpleNamespace(set_attn_implementation=names.append, generate_batch=generate_batch)
    with pytest.raises(RuntimeError, match="0 of 16 requests were done"):
        peers.measure_transformers(
            SimpleNamespace(GenerationConfig=SimpleNamespace), model, peers.Sizes(rows=16), "sdpa"
        )
    assert (names, given) == ([name], [options])


def test_a_peer_that_takes_too_long_is_left_behind() -> None:
    assert peers.within(60, lambda: 1.5) == 1.5
    with pytest.raises(ZeroDivisionError):
        peers.within(60, lambda: 1 / 0)
    never = threading.Event()
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        peers.within(0.01, lambda: float(never.wait()))
    never.set()


def test_the_large_models_are_those_that_are_named() -> None:
    shapes = invariance_child.weight_shapes(LLAMA_8B)
    num_weights = sum(outputs * inputs * count for outputs, inputs, count in shapes.values())
    assert num_weights + 128_256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert QWEN3_06B.num_heads * QWEN3_06B.head_dim == 2048
