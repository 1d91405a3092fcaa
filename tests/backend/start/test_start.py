"""From options to a plan, or to one line of error, before any weight is read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.kv_cache.budget.kv_plan import KvBudget
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.main import app
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.start.startup import (
    check_host_memory,
    check_memory,
    describe_pass,
    pass_options,
    plan_cache,
    plan_memory,
)
from tests.checkpoints import make_checkpoint
from tests.fake_encoder import FakeEncoder

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def run(*arguments: str) -> int:
    """The command's exit status."""
    try:
        app(arguments, result_action="return_value")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (
            LLAMA_8B,
            {
                "weights": "16.06 GB",
                "KV dtype": "q8_0",
                "bytes per token": "69,632",
                "pages": "2,692",
                "tokens": "86,144",
                "longest sequence": "86,144 tokens",
                "sequences of that length": "1",
                "bf16": "131,072 1,430 45,760 0.3",
                "q8_0": "69,632 2,692 86,144 0.7",
            },
        ),
        (
            QWEN3_06B,
            {
                "weights": "1.19 GB",
                "KV dtype": "bf16",
                "bytes per token": "114,688",
                "pages": "1,634",
                "tokens": "52,288",
                "longest sequence": "40,960 tokens",
                "sequences of that length": "1",
                "bf16": "114,688 1,634 52,288 1.3",
            },
        ),
    ],
)
def test_dry_run_plans_from_a_config_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], rows: dict[str, str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("--model", str(tmp_path), "--kv-budget", "6GB", "--dry-run") == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for name, value in rows.items():
        assert f"{name} {value}" in lines, shown


def test_dry_run_counts_quantised_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert run("--model", str(tmp_path), "--kv-budget", "6GB", "--dry-run", "--quantize", "int4") == 0
    shown = " ".join(capsys.readouterr().out.split())
    # Linears of 6.98e9 weights in 4 bits and 3 bytes per 32, lm_head in 8 bits and 2 per 32, the embedding in bf16.
    assert "weights 5.75 GB of the weights, linears int4 " in shown
    assert "KV dtype q8_0" in shown


def test_start_imports_torch_only_for_a_pass_that_needs_it_and_rich_only_for_a_dry_run() -> None:
    """torch takes more than a second to import."""
    code = "import sys, penstock.backend.main, penstock.backend.passes.fake; print({'torch', 'rich'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_settings_that_change_tokens_change_the_fingerprint() -> None:
    settings = [{"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "fp32"}, {"deterministic": True}]
    settings.append({"default_sampling": '{"temperature": 0.5}'})
    assert len({str(BackendOptions(**each).numerics("decoder")) for each in ({}, *settings)}) == 6  # type: ignore[arg-type]


def test_auto_budget_shows_free_and_reserved_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.backend.main.device_memory", lambda _device: MemoryInfo(16 * GB, 12 * GB, "this machine")
    )
    assert run("--kv-budget", "auto", "--dry-run") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for said in ("free on this machine 12.00 GB", "for the weights 7.61 MB", "in reserve 1.60 GB", "(auto) 10.39 GB"):
        assert said in shown


_MISFITS = [
    ("--cpu-path mmx", "--cpu-path is mmx, which this machine's architecture does not have: choose from auto"),
    ("--kv-budget 0", "--kv-budget is 0 B; one page of 32 tokens takes 34.82 KB: raise the budget or lower"),
    ("--kv-budget 30KB", "--kv-budget is 30.00 KB; one page of 32 tokens takes 34.82 KB: raise the budget"),
    ("--host-kv-budget 4GB", "--host-kv-budget is 4.00 GB; the model runs on the CPU, whose KV cache is in the"),
    ("--kv-budget 1MB --max-context 2000", "--max-context is 2000; --kv-budget 1.00 MB holds 896 tokens: raise"),
    ("--max-context 4096", "--max-context is 4096; this model supports 1 to 2048: lower --max-context"),
    ("--page-size 1 --kv-budget 1200", "--max-context is 2; --kv-budget 1.20 KB holds 1 tokens: raise the budget"),
    ("--max-batch-tokens 63", "--max-batch-tokens is 63; --max-running is 64, and each running sequence takes"),
    ("--max-running 193", "--max-batch-tokens is 192; --max-running is 193, and each running sequence takes"),
    ("--kv-dtype q8_0 --forward-pass fake", "--kv-dtype is q8_0; this forward pass has fp32: use one of these"),
    ("--quantize int8 --forward-pass fake", 'is int8; forward pass "fake" has only none: use --quantize none'),
    ("--gpu first", '--gpu is "first"; write an index such as 0'),
    (
        "--revision main",
        "--revision is main; the demo model has none: give a hub id as --model, or leave --revision out",
    ),
    ("--forward-pass :Class", 'forward pass ":Class" cannot be imported: ValueError: Empty module name'),
    ("--model=", "the model directory '' does not exist"),
]
"""Values that do not fit the model or the machine."""
_UNREADABLE = [
    ("--kv-budget=-1GB", 'for --kv-budget: "-1GB" is not a size; write 6GB, 512MiB or a number of bytes'),
    ("--kv-budget some", 'for --kv-budget: "some" is not a size'),
    ("--host-kv-budget lots", 'for --host-kv-budget: "lots" is not a size; write 6GB, 512MiB or a number of bytes'),
    ("--max-context 1", 'Invalid value "1" for --max-context. Must be >= 2.'),
    ("--max-context 0", "Must be >= 2."),
    ("--page-size 0", 'Invalid value "0" for --page-size. Must be >= 1.'),
    ("--page-size 5000", "Must be <= 4096."),
    ("--max-running 0", 'Invalid value "0" for --max-running. Must be >= 1.'),
    ("--max-running 5000", "Must be <= 4096."),
    ("--max-waiting 0", 'Invalid value "0" for --max-waiting. Must be >= 1.'),
    ("--max-batch-tokens 0", 'Invalid value "0" for --max-batch-tokens. Must be >= 1.'),
    ("--batch-channel-capacity=-1", 'Invalid value "-1" for --batch-channel-capacity. Must be >= 0.'),
    ("--batch-channel-capacity 17", "Must be <= 16."),
    ("--priority-step-s=-1", 'Invalid value "-1.0" for --priority-step-s. Must be >= 0'),
    ("--priority-step-s nan", 'Invalid value "nan" for --priority-step-s'),
    ("--kv-dtype int3", 'Invalid value "int3" for --kv-dtype. Choose from: "auto"'),
    (
        "--quantize int3",
        'Invalid value "int3" for --quantize. Choose from: "none", "int8", "int4", "int4-128", "f',
    ),
    ("--dtype int8", 'Invalid value "int8" for --dtype.'),
    ("--nothing", "Unknown option: --nothing."),
    ("--max-running", "--max-running requires an argument."),
]


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [*((*case, 1) for case in _MISFITS), *((*case, 2) for case in _UNREADABLE)],
)
@pytest.mark.parametrize("dry", [True, False])
def test_invalid_option_prints_one_line_and_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str, status: int, dry: bool
) -> None:
    words = ("--dry-run",) if dry else ("--socket", str(tmp_path / "s" / "backend.sock"))
    assert run(*words, *arguments.split()) == status
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("backend: ")
    assert said in line
    assert shown.out == ""


def test_dry_run_shows_host_memory_for_pages_if_there_is_any(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.backend.start.startup.host_memory", lambda: MemoryInfo(16 * GB, 12 * GB, "this machine")
    )
    for arguments, shows in (
        ("--gpu 7", "3.00 GB at most"),
        ("--gpu 7 --host-kv-budget 40GB", "40.00 GB at most"),
        ("--gpu 7 --host-kv-budget 0", None),
        ("--gpu none", None),
        ("--gpu none --host-kv-budget 0", None),
    ):
        assert run("--dry-run", "--kv-budget", "2GB", *arguments.split()) == 0
        shown = " ".join(capsys.readouterr().out.split())
        if shows is None:
            assert "host memory for pages" not in shown, arguments
        else:
            assert f"host memory for pages {shows}" in shown, arguments


def test_pass_receives_the_host_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.backend.start.startup.host_memory", lambda: MemoryInfo(64 * GB, 60 * GB, "this machine")
    )
    assert pass_options(BackendOptions(gpu="3", dry_run=True)).host_kv_bytes == 4 * GB
    assert pass_options(BackendOptions(gpu="3", dry_run=True, host_kv_budget=9 * GB)).host_kv_bytes == 9 * GB
    assert pass_options(BackendOptions(gpu="none")).host_kv_bytes == 0


def test_more_page_locked_memory_than_is_free_is_refused() -> None:
    check_host_memory(5 * GB, MemoryInfo(16 * GB, 5 * GB, "this machine"))
    said = r"--host-kv-budget is 6\.00 GB; 5\.00 GB are free on this machine: lower --host-kv-budget"
    with pytest.raises(StartupError, match=said):
        check_host_memory(6 * GB, MemoryInfo(16 * GB, 5 * GB, "this machine"))


def test_invalid_environment_setting_is_named_with_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KV_BUDGET", "lots")
    assert run("--dry-run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "PENSTOCK_KV_BUDGET" in line
    assert '"lots" is not a size' in line


@pytest.mark.parametrize(
    ("kv_budget", "device", "expected"),
    [(None, "cpu", 2 * GB), (None, "cuda:0", 9 * GB), ("auto", "cpu", 9 * GB), (5 * GB, "cuda:0", 5 * GB)],
)
def test_default_budget_is_auto_on_a_gpu_and_fixed_on_the_cpu(kv_budget: Any, device: str, expected: int) -> None:
    spec, memory = PassSpec(100, 1000, {"bf16": 10}), MemoryInfo(10 * GB, 10 * GB, device)
    assert plan_cache(BackendOptions(kv_budget=kv_budget), spec, device, memory).budget.num_bytes == expected


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [(None, "cpu", 192), (None, "cuda:0", 2048), (100, "cpu", 100), (100, "cuda:1", 100)],
)
def test_default_step_is_larger_on_a_gpu(wanted: int | None, device: str, expected: int) -> None:
    assert BackendOptions(max_batch_tokens=wanted).step_tokens(device) == expected


@pytest.mark.parametrize(("wanted", "expected"), [(None, 512), (100, 100)])
def test_default_step_is_larger_without_a_kv_cache(wanted: int | None, expected: int) -> None:
    assert BackendOptions(max_batch_tokens=wanted).step_tokens("cpu", has_cache=False) == expected


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0"])
def test_auto_budget_is_allocated_to_the_byte_and_never_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any, native: bool
) -> None:
    if not native:
        monkeypatch.setattr("penstock.backend.passes.decoder.cpu_pass.load_kernels", lambda _: None)
    model_dir = make_checkpoint("qwen3", tmp_path)
    options = BackendOptions(model=str(model_dir), kv_budget="auto", kv_dtype=kv_dtype, page_size=16, max_running=64)
    settings = pass_options(options)
    spec = CpuDecoderPass.describe(model_dir, settings)
    reserve, left = 512_000_000, 5_000_001
    memory = MemoryInfo(GB, spec.weight_bytes + reserve + left, "this machine")
    plan = plan_cache(options, spec, settings.device, memory)
    assert plan.budget.num_bytes == left
    forward_pass = CpuDecoderPass.load(model_dir, settings)
    assert isinstance(forward_pass, CpuDecoderPass)
    forward_pass.create_cache(plan.num_pages, plan.page_size_tokens, plan.kv_dtype)
    allocated = cache_bytes(forward_pass)
    forward_pass.close()
    assert allocated == plan.num_bytes
    assert left - plan.page_size_tokens * plan.bytes_per_token < allocated <= left
    assert plan.device_bytes <= memory.free_bytes - reserve
    check_memory(plan, memory)


def cache_bytes(forward_pass: CpuDecoderPass) -> int:
    ops = forward_pass._ops
    if isinstance(ops, NativeOps):
        return sum(layer.nbytes for layer in ops.cache.arrays)
    assert isinstance(ops, TorchOps)
    tensors = [tensor for heads in (*ops.cache.keys, *ops.cache.values) for tensor in heads.tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_by_default_states_take_at_most_half_of_the_budget() -> None:
    spec = PassSpec(100, 1000, {"bf16": 10}, state_bytes_per_sequence=50_000_000)
    memory = MemoryInfo(0, 0, "")
    assert plan_cache(BackendOptions(), spec, "cpu", memory).max_running == 20
    assert plan_cache(BackendOptions(kv_budget=50_000_000 * 200), spec, "cpu", memory).max_running == 64
    with pytest.raises(StartupError, match=r"the state of --max-running 64 sequences takes 3\.20 GB"):
        plan_cache(BackendOptions(max_running=64), spec, "cpu", memory)


def test_plan_over_total_memory_is_refused_and_over_free_memory_warns(caplog: pytest.LogCaptureFixture) -> None:
    spec = PassSpec(100, 1 << 24, {"bf16": 1000}, weight_bytes=3 * GB, workspace_bytes=GB)
    plan = plan_cache(BackendOptions(kv_budget=4 * GB), spec, "cpu", MemoryInfo(0, 0, ""))
    takes = "a KV cache of 4.00 GB, weights of 3.00 GB and a workspace of 1.00 GB are more than the"
    assert plan.budget == KvBudget(4 * GB)
    assert plan.device_bytes <= 8 * GB
    with pytest.raises(StartupError, match=rf"{takes} 7\.00 GB of this machine: lower --kv-budget"):
        check_memory(plan, MemoryInfo(7 * GB, 7 * GB, "this machine"))
    with caplog.at_level(logging.WARNING):
        check_memory(plan, MemoryInfo(8 * GB, 8 * GB, "this machine"))
        assert caplog.messages == []
        check_memory(plan, MemoryInfo(8 * GB, 7 * GB, "this machine"))
    assert caplog.messages == [f"{takes} 7.00 GB that are free on this machine: lower --kv-budget if memory runs short"]
    with pytest.raises(StartupError, match=rf"{takes} 7\.00 GB that are free on GPU 0: lower --kv-budget"):
        check_memory(plan, MemoryInfo(80 * GB, 7 * GB, "GPU 0"), "cuda:0")


FAKE_ENCODER = "tests.fake_encoder:FakeEncoder"


def test_dry_run_of_an_encoder_has_no_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--forward-pass", FAKE_ENCODER, "--max-batch-tokens", "800", "--gpu", "none", "--dry-run") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "KV cache none",
        "longest input 512 tokens",
        "inputs of a step 100",
        "tokens of a step with several 800",
        "values of a vector, embed 8",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "generate"], '--task is generate; with forward pass "{}" the model gives embed, token_embed'),
        (["--max-context", "513"], "--max-context is 513; the model supports at most 512"),
        (["--quantize", "int8"], '--quantize is int8; forward pass "{}" has only none'),
    ],
)
def test_encoder_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run("--forward-pass", FAKE_ENCODER, "--gpu", "none", "--dry-run", *arguments) != 0
    assert message.format(FAKE_ENCODER) in " ".join(capsys.readouterr().err.split())


def test_model_that_generates_refuses_to_embed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--forward-pass", "fake", "--task", "embed", "--gpu", "none", "--dry-run") != 0
    assert '--task is embed; with forward pass "fake" the model gives text' in " ".join(capsys.readouterr().err.split())


def test_step_of_an_encoder_holds_its_longest_input() -> None:
    options = BackendOptions(gpu="none", max_context=300, max_batch_tokens=200, max_running=4)
    spec, settings = describe_pass(options, "", FakeEncoder, DEMO_MODEL_DIR, pass_options(options))
    assert (settings.max_batch_tokens, settings.max_running) == (300, 25)
    plan = plan_memory(options, spec, settings, MemoryInfo(0, 0, ""))
    assert isinstance(plan, WholePlan)
    assert (plan.max_context_tokens, plan.step_tokens, plan.max_rows) == (300, 200, 25)
