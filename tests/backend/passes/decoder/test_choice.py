"""DecoderPass chooses the implementation for the device, and the CPU's one its operations and formats of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.kv_cache.budget.kv_plan import KvBudget, plan_kv
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.decoder import cpu_pass as forward_pass
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass, make_cpu_ops
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from tests.checkpoints import make_checkpoint
from tests.temporary import make_shared_directory


def test_the_installed_decoder_is_the_chooser() -> None:
    assert find_forward_pass("decoder") is DecoderPass


def test_cpu_options_load_the_cpu_pass(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    loaded = DecoderPass.load(model_dir, PassOptions())
    assert isinstance(loaded, CpuDecoderPass)
    assert DecoderPass.describe(model_dir, PassOptions()) == loaded.spec
    loaded.close()


def test_gpu_options_describe_the_cuda_pass(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path, head_dim=64)
    options = PassOptions(device="cuda:0")
    assert DecoderPass.describe(model_dir, options) == CudaDecoderPass.describe(model_dir, options)


def test_missing_model_directory_is_refused() -> None:
    for start in (DecoderPass.describe, DecoderPass.load):
        with pytest.raises(StartupError, match="give --model a directory or a hub id"):
            start(None, PassOptions())


def test_kv_dtypes_start_with_that_of_the_weights_and_end_with_wider_ones() -> None:
    model_dir = make_checkpoint("qwen3", make_shared_directory())

    def offered(dtype: str) -> dict[str, int]:
        return dict(CpuDecoderPass.describe(model_dir, PassOptions(dtype=dtype)).kv_bytes_per_token)

    values = 2 * 3 * 2 * 32
    sizes = {"fp32": 4 * values, "bf16": 2 * values, "q8_0": values * 34 // 32}
    assert offered("fp32") == offered("bf16") == sizes
    assert list(offered("fp32")) == ["fp32", "bf16", "q8_0"]
    assert list(offered("bf16")) == ["bf16", "q8_0", "fp32"]


def test_heads_without_whole_blocks_have_no_q8_0() -> None:
    spec = CpuDecoderPass.describe(make_checkpoint("llama3", make_shared_directory()), PassOptions())
    assert set(spec.kv_bytes_per_token) == {"fp32", "bf16"}
    settings: Any = {"max_context_tokens": None, "max_running": 4, "budget": KvBudget(1 << 30)}
    with pytest.raises(StartupError, match="--kv-dtype is q8_0; this forward pass has fp32, bf16"):
        plan_kv(spec, kv_dtype="q8_0", groups=KvGroups(16), **settings)


def test_torch_operations_run_without_a_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "load_kernels", lambda _: None)
    config = read_decoder_config(make_checkpoint("llama3", make_shared_directory()))
    assert isinstance(make_cpu_ops(config, Dtype.FP32, 16), TorchOps)


def test_torch_operations_run_heads_without_whole_vectors(caplog: pytest.LogCaptureFixture) -> None:
    config = read_decoder_config(make_checkpoint("llama2", make_shared_directory(), hidden_size=48))
    assert config.head_dim == 12
    with caplog.at_level("INFO", logger="penstock.backend"):
        assert isinstance(make_cpu_ops(config, Dtype.FP32, 16), TorchOps)
    assert "no support for heads of 12" in caplog.text
