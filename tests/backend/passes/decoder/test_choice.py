"""DecoderPass chooses the implementation for the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.backend.plugins import find_forward_pass
from tests.checkpoints import make_checkpoint


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
