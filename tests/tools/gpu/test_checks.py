"""Compilation, correctness and whole passes, on the emulated device with small sizes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import grouped_mm

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.device.cubin_cache import cubin_name
from penstock.backend.passes.cuda.device.cupy_launcher import LoadedKernel
from penstock.backend.passes.cuda.device.launcher import Kernel, group_by_module
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu import environment, items
from penstock.tools.gpu.cases.attention.catalogue import choice_checks
from penstock.tools.gpu.cases.catalogue import small_checks, small_wgmma_checks, wgmma_checks, wide_checks
from penstock.tools.gpu.cases.check import Check, Mismatch
from penstock.tools.gpu.cases.products.experts import ExpertsCase
from penstock.tools.gpu.checks import (
    checkpoint,
    compilation,
    correctness,
    pass_agreement,
    small_cases,
)
from penstock.tools.gpu.devices import mirror_launcher
from penstock.tools.gpu.devices.steps import generate
from penstock.tools.gpu.results import CHECKPOINT_VARIABLE
from penstock.tools.random_weights import TINY_FAMILY
from tests.backend.checkpoint.gguf.test_gguf_models import make_file
from tests.cuda_emulator import EmulatedLauncher
from tests.tools.gpu.device_context import Record

if TYPE_CHECKING:
    from penstock.backend.passes.cuda.device.launcher import Launcher
    from penstock.tools.gpu.devices.device_context import DeviceContext


def test_environment_without_a_gpu_fails_and_says_so(record: Record) -> None:
    environment.run(record.results, items.choose(["environment"])[0])
    with pytest.raises(AssertionError, match="torch finds no CUDA device"):
        record.findings()
    assert environment.describe_environment()["torch"] == torch.__version__


def test_compilation_records_each_architecture_and_writes_what_a_later_run_loads(
    record: Record, tmp_path: Path
) -> None:
    kernels = [kernel for kernel in kernel_manifest.kernels() if kernel.source in ("rows/norms.cu", "step/step.cu")]
    cubins = tmp_path / "cubins"
    compilation.compile_for(record.results, kernels, ["sm_80", "sm_90a"], 2, cubins)
    found = record.findings()
    assert found["compile.sm_90a.no_spills"].value == len(kernels)
    assert found["compile.sm_80.no_spills"].passed
    names = [cubin_name(group, arch) for group in group_by_module(kernels) for arch in ("sm_80", "sm_90a")]
    assert sorted(names) == sorted(path.name for path in cubins.iterdir())
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in cubins.iterdir())


def test_loading_checks_local_memory_as_the_driver_reports_it(record: Record) -> None:
    kernels = [Kernel("step/step.cu", name, (), 128) for name in ("change_pages", "other")]
    launcher: Any = SimpleNamespace(
        prepare=lambda _kernels: None,
        resources={kernel: LoadedKernel(32, 8 * index) for index, kernel in enumerate(kernels)},
        cubins=SimpleNamespace(arch="sm_90a", num_compiled=0),
    )
    compilation.load_all(record.results, launcher, kernels)
    with pytest.raises(AssertionError, match=r"\[\('compile.sm_90a.no_spills', 'other'\)\]"):
        record.findings()


def test_each_family_and_each_failed_check_is_a_finding(record: Record) -> None:
    def fail(_launcher: Launcher) -> None:
        raise Mismatch("3 of 4 bytes differ")

    checks = [
        Check("norm", "good", lambda _launcher: 0.25),
        Check("norm", "bad", fail),
        Check("ptx", "x", lambda _: None),
    ]
    correctness.run_checks(record.results, EmulatedLauncher(), checks)
    by_name = {finding.name: finding for finding in record.all()}
    assert by_name["norm.bad"].detail.startswith("Mismatch: 3 of 4 bytes differ")
    assert (by_name["correctness.norm"].passed, by_name["correctness.norm"].value) == (False, 0.25)
    assert by_name["correctness.ptx"].passed


def test_checks_stop_when_no_time_is_left(tmp_path: Path) -> None:
    record = Record(tmp_path, -1.0)
    correctness.run_checks(record.results, EmulatedLauncher(), [Check("norm", "x", lambda _: None)])
    with pytest.raises(AssertionError, match="0 of 1 passed"):
        record.findings()


def test_cuda_pass_agrees_with_the_cpu_pass(
    record: Record, context: DeviceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_agreement, "_ROWS", 2)
    monkeypatch.setattr(pass_agreement, "_SIZES", StepSizes(max_rows=2, max_tokens=80, max_context_tokens=80))
    # The other models: tests/backend/passes/cuda/test_pass_on_emulator.py; other forms: test_quantized_pass.py there.
    pass_agreement.check_variations(record.results, context, "qwen3", ("mxfp4",))
    assert {
        "pass.qwen3.fp16", "pass.experts.bf16", "pass.qwen3.mxfp4",
        "pass.experts.mxfp4",
    } == set(record.findings())  # fmt: skip


def test_a_pass_with_a_wrong_row_does_not_agree(context: DeviceContext, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY_FAMILY["llama"]
    assert 1e-3 < pass_agreement.compare_logits(context, config, "bf16")[1] < 3e-2
    run = pass_agreement._fed_logits

    def with_one_row_of_another(forward_pass: object, *arguments: object) -> object:
        logits = run(forward_pass, *arguments)  # type: ignore[arg-type]
        if not isinstance(getattr(forward_pass, "_ops", None), TorchOps):
            logits[2, 3] = logits[1, 3]
        return logits

    monkeypatch.setattr(pass_agreement, "_fed_logits", with_one_row_of_another)
    with pytest.raises(Mismatch, match="error of a row's logits"):
        pass_agreement.compare_logits(context, config, "fp32")


def test_another_token_is_a_mismatch_unless_it_ties() -> None:
    config = TINY_FAMILY["llama"]
    on_cpu, prompts = partial(pass_agreement._on_cpu, config), pass_agreement._prompts(config)
    expected = generate(on_cpu(), prompts, 5, 5)
    pass_agreement.require_same_tokens(on_cpu, prompts, expected.copy(), expected, 1e-4)
    other = expected.copy()
    other[3, 2] = (other[3, 2] + 1) % config.vocab_size
    with pytest.raises(Mismatch, match="row 3 has another token 2; the gap of its logit: an error of"):
        pass_agreement.require_same_tokens(on_cpu, prompts, other, expected, 1e-4)
    pass_agreement.require_same_tokens(on_cpu, prompts, other, expected, 10.0)


@pytest.mark.usefixtures("context")
def test_checkpoint_in_parts_has_the_tokens_of_the_cpu(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    (item,) = items.choose(["checkpoint"])
    checkpoint.run(record.results, item)
    assert record.findings()["checkpoint"].detail == "not measured: --checkpoint names no file"
    path = tmp_path / "whole.gguf"
    make_file("llama, Q4_0")[0].write(path)
    content = path.read_bytes()
    for number in range(3):
        part = content[number * len(content) // 3 : (number + 1) * len(content) // 3]
        (tmp_path / f"part.a{number}").write_bytes(part)
    monkeypatch.setenv(CHECKPOINT_VARIABLE, str(tmp_path / "part."))
    checkpoint.run(record.results, item)
    found = record.findings()
    assert found["checkpoint.fp32"].value == 4 * 24
    assert found["checkpoint.bf16"].passed


def test_library_products_are_checked_on_the_device(
    record: Record, context: DeviceContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []
    for name in ("_int_mm", "_scaled_mm"):
        product = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda x, *rest, p=product, **named: (found.append(x), p(x, *rest, **named))[1]
        )
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda x, *rest, **named: (found.append(x), grouped_mm(x, *rest, **named))[1]
    )
    grouped = ExpertsCase(Experts(5, 2, 40, normalises=True), 72, 9, torch.bfloat16, grouped_rows=9)
    correctness.check_library(record.results, context.device, ((32, 72, 260),), grouped)
    findings = record.findings()
    assert {
        "library.rounded.260.has_bias.bf16.int8", "library.rounded.260.scale.bf16.fp8", "library.widened.fp16.fp8-128"
    } <= set(findings)  # fmt: skip
    assert findings["library.grouped"].passed
    assert {x.dtype for x in found} == {torch.int8, torch.float8_e4m3fn, torch.bfloat16}


def test_small_checks_launch_every_kernel_source(capsys: pytest.CaptureFixture[str]) -> None:
    sources: set[str] = set()

    class RecordingLauncher(EmulatedLauncher):
        def launch(self, kernel: Kernel, grid: Any, *arguments: Any) -> None:
            sources.add(kernel.source)
            super().launch(kernel, grid, *arguments)

    assert small_cases.run_checks(RecordingLauncher(), [*small_checks(), *small_wgmma_checks()]) == 0
    assert capsys.readouterr().out == "failed: none\n"
    assert {kernel.source for kernel in kernel_manifest.kernels()} <= sources


def test_failed_small_check_is_named_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_launcher: Launcher) -> None:
        raise Mismatch("3 of 4 bytes differ")

    checks = [Check("norm", "bad", fail), Check("norm", "worse", fail)]
    assert small_cases.run_checks(EmulatedLauncher(), checks) == 1
    assert capsys.readouterr().out == "failed: norm.bad: 3 of 4 bytes differ; norm.worse: 3 of 4 bytes differ\n"


def test_every_check_is_in_one_item(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = MirrorOfNothing()
    monkeypatch.setattr(mirror_launcher, "MirrorLauncher", lambda: launcher)
    found: list[Check] = []
    monkeypatch.setattr(correctness, "run_checks", lambda _results, _launcher, checks: found.extend(checks))
    for item in items.ITEMS:
        if item.module == correctness.__name__ and item.arguments != ("library",):
            correctness.run(record.results, item)
    shared_bytes = launcher.shared_bytes_per_sm
    checks = [*wide_checks(shared_bytes), *choice_checks(shared_bytes), *wgmma_checks()]
    assert sorted(f"{check.family}.{check.name}" for check in found) == sorted(
        f"{check.family}.{check.name}" for check in checks
    )


class MirrorOfNothing:
    shared_bytes_per_sm = 228 << 10
    has_wgmma = True
