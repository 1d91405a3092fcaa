"""All implementations of the decoder's operations on the CPU, as fixtures: a test runs on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backend.passes.decoder.cpu.deterministic_torch_ops import DeterministicTorchOps
from penstock.backend.passes.decoder.cpu.native_library import (
    AVX2_FLAGS,
    LibraryUnavailableError,
    cache_dir,
    find_compiler,
    load_library,
    open_library,
)
from penstock.backend.passes.decoder.cpu.native_ops import NativeOps, supports_native_ops
from penstock.backend.passes.decoder.cpu.torch_ops import TorchOps
from penstock.backend.passes.decoder.ops import HeadShape, Ops

if TYPE_CHECKING:
    from penstock.backend.checkpoint.decoder_config import DecoderConfig

MakeOps = Callable[..., Any]


def make_torch_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Ops:
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    return TorchOps(heads, config.rope, config.rms_norm_eps, dtype)


def make_deterministic_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Ops:
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    return DeterministicTorchOps(heads, config.rope, config.rms_norm_eps, dtype)


def make_native_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    library = load_library()
    if library is None:
        pytest.skip("this machine has no native kernels")
    assert supports_native_ops(config)
    return NativeOps(library, config, dtype, max_batch_tokens=8, num_threads=num_threads, spin_s=20e-6)


def make_avx2_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels of a machine without AVX-512."""
    try:
        library = open_library(cache_dir(), find_compiler(), AVX2_FLAGS)
    except LibraryUnavailableError as error:
        pytest.skip(f"this machine has no AVX2 kernels: {error}")
    return NativeOps(library, config, dtype, max_batch_tokens=8, num_threads=num_threads, spin_s=20e-6)


NATIVE = {"native": make_native_ops, "avx2": make_avx2_ops}
ALL: dict[str, MakeOps] = {"torch": make_torch_ops, **NATIVE}


@pytest.fixture(params=ALL)
def make_ops(request: pytest.FixtureRequest) -> MakeOps:
    return ALL[request.param]


@pytest.fixture(params=NATIVE)
def make_kernels(request: pytest.FixtureRequest) -> MakeOps:
    return NATIVE[request.param]


DETERMINISTIC: dict[str, MakeOps] = {**NATIVE, "torch": make_deterministic_ops}


@pytest.fixture(params=DETERMINISTIC)
def make_deterministic(request: pytest.FixtureRequest) -> MakeOps:
    """Operations that give each row the same bits in any batch."""
    return DETERMINISTIC[request.param]
