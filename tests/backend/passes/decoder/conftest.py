"""All implementations of the decoder's operations on the CPU, as fixtures: a test runs on each."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backend.passes.decoder.cpu.deterministic_torch_ops import DeterministicTorchOps
from penstock.backend.passes.decoder.cpu.native_library import (
    AVX2_FLAGS,
    EMULATED_TILES_FLAGS,
    cache_dir,
    find_compiler,
    load_library,
    open_library,
    request_tiles,
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
    """The kernels that this machine uses: those of AMX if it has it."""
    library = load_library()
    if library is None:
        pytest.skip("this machine has no native kernels")
    return _make_ops(library, config, dtype, num_threads, uses_tiles=request_tiles(library))


def make_vector_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels where the system refuses AMX."""
    library = load_library()
    if library is None or not request_tiles(library):
        pytest.skip("this machine has no AMX: its native kernels are these")
    return _make_ops(library, config, dtype, num_threads, uses_tiles=False)


def make_tile_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels for AMX, with emulated tiles."""
    return _make_ops(_compile(EMULATED_TILES_FLAGS), config, dtype, num_threads, uses_tiles=True)


def make_avx2_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels of a machine without AVX-512."""
    return _make_ops(_compile(AVX2_FLAGS), config, dtype, num_threads, uses_tiles=False)


def _compile(flags: tuple[str, ...]) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 machine with a C++ compiler: install g++")
    return open_library(cache_dir(), compiler, flags)


def _make_ops(
    library: ctypes.CDLL, config: DecoderConfig, dtype: torch.dtype, num_threads: int, *, uses_tiles: bool
) -> NativeOps:
    assert supports_native_ops(config)
    return NativeOps(
        library, config, dtype, max_batch_tokens=8, num_threads=num_threads, spin_s=20e-6, uses_tiles=uses_tiles
    )


NATIVE = {"native": make_native_ops, "vectors": make_vector_ops, "tiles": make_tile_ops, "avx2": make_avx2_ops}
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
