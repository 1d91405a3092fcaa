"""The sections environment, compile and correctness, on the emulated device with small sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.device.cubin_cache import cubin_name
from penstock.backend.passes.cuda.device.cupy_launcher import LoadedKernel
from penstock.backend.passes.cuda.device.launcher import Kernel, group_by_module
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu import environment
from penstock.tools.gpu.cases.attention.choices import choice_checks
from penstock.tools.gpu.cases.catalogue import wgmma_checks, wide_checks
from penstock.tools.gpu.cases.check import Check, Mismatch
from penstock.tools.gpu.checks import (
    compilation,
    correctness,
    encoder_agreement,
    library_products,
    pass_agreement,
    transformers_agreement,
)
from penstock.tools.random_weights import TINY_FAMILY
from tests.cuda_emulator import EmulatedLauncher
from tests.tools.gpu.device_context import Record, make_device_context

if TYPE_CHECKING:
    from penstock.backend.passes.cuda.device.launcher import Launcher


def test_environment_without_a_gpu_fails_and_says_so(record: Record) -> None:
    environment.run(record.results)
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
    assert found["compile.sm_90a.kernels"].value == len(kernels)
    assert found["compile.sm_80.no_spills"].passed
    assert "add_rms_norm" in str(found["compile.sm_90a.registers"].value)
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


def test_each_family_and_each_failed_check_is_a_finding(record: Record, tmp_path: Path) -> None:
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


def test_checks_stop_when_only_the_reserve_is_left(tmp_path: Path) -> None:
    record = Record(tmp_path, 5.0)
    correctness.run_checks(record.results, EmulatedLauncher(), [Check("norm", "x", lambda _: None)], reserve_s=10.0)
    with pytest.raises(AssertionError, match="0 of 1 passed"):
        record.findings()


def test_cuda_pass_agrees_with_the_cpu_pass(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_agreement, "_ROWS", 2)
    monkeypatch.setattr(pass_agreement, "_SIZES", StepSizes(max_rows=2, max_tokens=80, max_context_tokens=80))
    context = make_device_context()
    # The other models: tests/backend/passes/cuda/test_pass_on_emulator.py; other forms: test_quantized_pass.py there.
    pass_agreement.check_families(record.results, context, ("qwen3", "gpt-oss"))
    pass_agreement.check_variations(record.results, context, "qwen3", ("mxfp4",))
    findings = record.findings()
    assert {
        "pass.qwen3.fp32", "pass.gpt-oss.fp32", "pass.qwen3.bf16", "pass.qwen3.fp16", "pass.experts.bf16",
        "pass.qwen3.tokens",
    } <= set(findings)  # fmt: skip
    assert "pass.gpt-oss.bf16" not in findings
    assert findings["pass.qwen3.mxfp4"].passed
    assert findings["pass.experts.mxfp4"].passed
    assert findings["pass.qwen3.embeddings"].passed
    assert findings["pass.qwen3.scores"].passed
    assert findings["pass.qwen3.vectors"].passed


def test_another_token_is_a_mismatch_unless_it_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY_FAMILY["llama"]
    expected = pass_agreement._tokens(pass_agreement._on_cpu(config), config)
    pass_agreement.require_same_tokens(config, expected.copy(), expected)
    other = expected.copy()
    other[3, 2] = (other[3, 2] + 1) % config.vocab_size
    with pytest.raises(Mismatch, match="row 3 has another token 2; the gap of its logit: an error of"):
        pass_agreement.require_same_tokens(config, other, expected)
    monkeypatch.setattr(pass_agreement, "_TIE", 10.0)
    pass_agreement.require_same_tokens(config, other, expected)


def test_the_forward_pass_transformers_on_the_gpu_agrees_with_the_cpu(record: Record) -> None:
    transformers_agreement.check_transformers(record.results, make_device_context())
    assert {"pass.transformers.Llama", "pass.transformers.OlmoHybrid"} == set(record.findings())


def test_the_encoder_on_the_gpu_agrees_with_the_cpu(record: Record) -> None:
    encoder_agreement.check_encoder(record.results, make_device_context(), (1, 16, 75))
    findings = record.findings()
    assert {"encoder.fp32", "encoder.bf16", "encoder.int8"} <= set(findings)
    assert float(findings["encoder.int8"].value or 1) < 0.01


def test_library_products_are_checked_on_the_device(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    for name in ("_int_mm", "_scaled_mm"):
        product = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda x, *rest, p=product, **named: (found.append(x), p(x, *rest, **named))[1]
        )
    library_products.check_library_products(record.results, make_device_context(), ((32, 72, 260),))
    findings = record.findings()
    assert {"library.rounded.bf16.int8", "library.rounded.bf16.fp8", "library.widened.fp16.fp8-128"} <= set(findings)
    assert {x.dtype for x in found} == {torch.int8, torch.float8_e4m3fn}


def test_share_of_the_checks_that_dies_is_a_failed_check(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share that lost the device has said so itself."""
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\ncase $3 in sound) exit 0 ;; lost) exit 3 ;; broken) exit 4 ;; esac\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(correctness, "SHARES", ("sound", "lost", "broken"))
    correctness.run(record.results)
    with pytest.raises(AssertionError, match=r"^\[\('correctness\.broken', 'its process ended with status 4'\)\]$"):
        record.findings()


def test_every_check_is_in_one_share(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = MirrorOfNothing()
    monkeypatch.setattr(correctness, "MirrorLauncher", lambda: launcher)
    found: list[Check] = []
    monkeypatch.setattr(correctness, "run_checks", lambda _results, _launcher, checks: found.extend(checks))
    for share in ("attention", "quantised", "experts", "other-kernels"):
        correctness.SHARES[share](record.results)
    shared_bytes = launcher.shared_bytes_per_sm
    checks = [*wide_checks(shared_bytes), *choice_checks(shared_bytes), *wgmma_checks()]
    assert sorted(f"{check.family}.{check.name}" for check in found) == sorted(
        f"{check.family}.{check.name}" for check in checks
    )


class MirrorOfNothing:
    shared_bytes_per_sm = 228 << 10
    has_wgmma = True
