"""Settings that were adopted for a GPU model: where they are found, and which files are refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.options import GPU_STEP_TOKENS, PAGE_TOKENS, BackendOptions
from penstock.backend.passes.cuda.device import kernel_choices
from penstock.backend.passes.cuda.device.kernel_choices import (
    ALLOWED,
    CONSTANTS,
    ChoicesRefused,
    KernelChoices,
    adopted_choices,
    find_choices,
    read_choices,
)
from penstock.backend.passes.fake import FakePass
from penstock.backend.start import startup

H200 = ("NVIDIA H200", (9, 0))


def test_constants_are_allowed_and_are_the_options_defaults() -> None:
    assert all(value in ALLOWED[name] for name, value in asdict(CONSTANTS).items())
    assert asdict(CONSTANTS).keys() == ALLOWED.keys()
    assert (CONSTANTS.page_size_tokens, CONSTANTS.step_tokens) == (PAGE_TOKENS, GPU_STEP_TOKENS)


def test_a_gpu_models_file_goes_before_its_architectures(tmp_path: Path) -> None:
    assert find_choices(*H200, tmp_path) == (CONSTANTS, "not measured on NVIDIA H200")
    (tmp_path / "sm_90.toml").write_text("ring_tiles = 4\n")
    assert find_choices(*H200, tmp_path) == (KernelChoices(ring_tiles=4), "adopted for sm_90")
    (tmp_path / "nvidia-h200.toml").write_text("# A run.\nchunk_tokens = 128\npage_size_tokens = 64\n")
    assert find_choices(*H200, tmp_path)[0] == KernelChoices(chunk_tokens=128, page_size_tokens=64)
    assert find_choices("NVIDIA H100 80GB HBM3", (9, 0), tmp_path)[0].ring_tiles == 4
    assert find_choices("NVIDIA A100-SXM4-80GB", (8, 0), tmp_path)[0] == CONSTANTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ring_tiles = 9", r"x\.toml: ring_tiles is 9; it must be one of 3, 4, 5, 6, 7, 8"),
        ("ring_tiles = true", "ring_tiles is True; it must be one of"),
        ("step_tokens = 2048.0", r"step_tokens is 2048\.0; it must be one of 512, 1024"),
        ("rings = 4", "has the unknown setting rings; known are page_size_tokens, "),
        ("ring_tiles 4", "is not a TOML file"),
        ("#" * (1 << 17), "has more than 65,536 bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_setting_and_the_limit(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ChoicesRefused, match=said):
        read_choices(tmp_path / "x.toml")
    with pytest.raises(ChoicesRefused, match="cannot be read: No such file"):
        read_choices(tmp_path / "absent.toml")


def test_a_bad_file_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sm_90.toml").write_text("chunk_tokens = 100")
    properties = type("Properties", (), {"name": "NVIDIA H200", "major": 9, "minor": 0})
    monkeypatch.setattr(kernel_choices, "DIRECTORY", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    adopted = adopted_choices.__wrapped__
    with pytest.raises(StartupError, match="chunk_tokens is 100; it must be one of 128, 256, 512; remove the file"):
        adopted("cuda:0")
    assert adopted("cpu") == (CONSTANTS, "not measured")
    (tmp_path / "sm_90.toml").write_text("chunk_tokens = 512")
    assert adopted("cuda:0") == (KernelChoices(chunk_tokens=512), "adopted for sm_90")
    assert adopted("cuda:1") == (CONSTANTS, "the GPU is not there")


def test_adopted_sizes_of_pages_and_steps_are_defaults_that_options_overrule(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = KernelChoices(page_size_tokens=64, step_tokens=4096)
    monkeypatch.setattr(startup, "adopted_choices", lambda _device: (chosen, "adopted"))
    for given, expected in (({}, (64, 4096)), ({"page_size": 16, "max_batch_tokens": 512}, (16, 512))):
        options = BackendOptions(gpu="0", dry_run=True, kv_budget=10**9, **given)  # type: ignore[arg-type]
        settings = startup.pass_options(options)
        spec = replace(FakePass.describe(None, settings), page_sizes=())
        plan = startup.plan_cache(options, spec, settings.device, MemoryInfo(0, 0, ""))
        assert (plan.page_size_tokens, settings.max_batch_tokens) == expected


def test_only_choices_that_change_bits_change_the_fingerprint() -> None:
    assert KernelChoices(ring_tiles=3, page_size_tokens=64, step_tokens=512).numerics() == {}
    constants = {
        "chunk tokens": "256", "chunk levels": "0", "key tokens": "64", "wgmma": "1", "product rows": "4",
        "small product rows": "32", "quantised rows": "64", "rounded rows": "257", "grouped rows": "0",
            "whole products": "0",
    }  # fmt: skip
    smaller = KernelChoices(query_rows=64)  # mma.sync alone has such tiles
    assert smaller.numerics() == constants | {"wgmma": "0"}
    assert "wgmma 0" in smaller.of_kernels()
    assert KernelChoices(chunk_tokens=128).numerics() == constants | {"chunk tokens": "128"}
    assert KernelChoices(key_tokens=32).numerics() == constants | {"key tokens": "32", "wgmma": "0"}
    assert KernelChoices(wgmma=0).numerics() == constants | {"wgmma": "0"}
    assert KernelChoices(product_rows=8).numerics() == constants | {"product rows": "8"}


def test_small_models_have_a_limit_of_rows_of_their_own() -> None:
    chosen = KernelChoices(product_rows=2, small_product_rows=16)
    assert [chosen.product_rows_of(hidden_size) for hidden_size in (1024, 2047, 2048, 4096)] == [16, 16, 2, 2]
