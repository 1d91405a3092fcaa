"""All implementations of the decoder's operations on the CPU, as fixtures: a test runs on each. And what tests of held
weights and of passes on the emulator share."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backend.checkpoint.quantization import quantized_checkpoint
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.in_torch.deterministic_torch_ops import DeterministicTorchOps
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.cpu.kernel_limits import supports_native_ops
from penstock.backend.passes.cpu.library.cpu_paths import read_cpu_info, supported_paths
from penstock.backend.passes.cpu.library.native_library import request_tiles
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.cpu.path_choice import load_kernels
from penstock.backend.passes.ops.interface import Ops
from penstock.backend.passes.ops.layer_groups import LayerGroups, one_group, split_groups
from penstock.shm.memory.fd_mailbox import FdMailbox
from tests.backend.passes.cpu.path_libraries import open_emulated_tiles, open_path

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig

MakeOps = Callable[..., Any]


def make_torch_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Ops:
    return TorchOps(config, dtype)


def make_deterministic_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Ops:
    return DeterministicTorchOps(config, dtype)


def groups_for(ops: Ops, config: DecoderConfig) -> LayerGroups:
    """Groups with pages of their own, if the operations can have them."""
    shares = isinstance(ops, NativeOps) or config.full_heads is None
    return split_groups(config) if shares else one_group(config)


def make_native_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels that this machine uses."""
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("this machine has no native kernels")
    return _make_ops(kernels.library, config, dtype, num_threads, uses_tiles=kernels.path.uses_tiles)


def make_tile_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels for AMX, with emulated tiles."""
    return _make_ops(open_emulated_tiles(), config, dtype, num_threads, uses_tiles=True)


def make_amx_ops(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
    """The kernels for AMX, on a machine that has it."""
    library = open_path("amx")
    if not request_tiles(library):
        pytest.skip("the system refuses AMX tiles")
    return _make_ops(library, config, dtype, num_threads, uses_tiles=True)


def _path_ops(name: str) -> MakeOps:
    def make(config: DecoderConfig, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> NativeOps:
        return _make_ops(open_path(name), config, dtype, num_threads, uses_tiles=False)

    return make


def _make_ops(
    library: ctypes.CDLL, config: DecoderConfig, dtype: torch.dtype, num_threads: int, *, uses_tiles: bool
) -> NativeOps:
    assert supports_native_ops(config)
    return NativeOps(
        library,
        config,
        Dtype.of(dtype),
        max_batch_tokens=8,
        num_threads=num_threads,
        spin_s=20e-6,
        uses_tiles=uses_tiles,
    )


# What avx512_vnni compiles is in avx512 or in avx512_bf16. Without AMX, tiles in C++ stand for its tiles.
_ON_X86: dict[str, MakeOps] = {
    "avx2": _path_ops("avx2"),
    "avx512": _path_ops("avx512"),
    "avx512_bf16": _path_ops("avx512_bf16"),
    "tiles": make_tile_ops,
}
if "amx" in (path.name for path in supported_paths(read_cpu_info())):
    _ON_X86["amx"] = make_amx_ops
# On x86-64 cpu/arm/test_arm_kernels.py tests these.
_ON_ARM: dict[str, MakeOps] = {"neon": _path_ops("neon"), "neon_bf16": _path_ops("neon_bf16")}
NATIVE = _ON_ARM if platform.machine() == "aarch64" else _ON_X86
ALL: dict[str, MakeOps] = {"torch": make_torch_ops, **NATIVE}


@pytest.fixture(params=ALL)
def make_ops(request: pytest.FixtureRequest) -> MakeOps:
    return ALL[request.param]


@pytest.fixture(params=[make_torch_ops, make_native_ops], ids=["torch", "native"])
def make_usual_ops(request: pytest.FixtureRequest) -> MakeOps:
    """Operations in torch and those that this machine uses: for tests of models, where other tests cover the operations
    on every path."""
    made: MakeOps = request.param
    return made


@pytest.fixture(params=NATIVE)
def make_kernels(request: pytest.FixtureRequest) -> MakeOps:
    return NATIVE[request.param]


DETERMINISTIC: dict[str, MakeOps] = {**NATIVE, "torch": make_deterministic_ops}


@pytest.fixture(params=DETERMINISTIC)
def make_deterministic(request: pytest.FixtureRequest) -> MakeOps:
    """Operations that give each row the same bits in any batch."""
    return DETERMINISTIC[request.param]


@pytest.fixture
def mailbox() -> Iterator[FdMailbox]:
    made = FdMailbox.create()
    yield made
    made.close()


@pytest.fixture
def keeps_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights are made anew."""
    monkeypatch.setattr(quantized_checkpoint, "_open_kept", lambda *_: (None, None))


@pytest.fixture
def choosy_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product's bits depend on its number of rows."""

    def choosy(multiply: Any) -> Any:
        def by_rows(*operands: torch.Tensor, out: torch.Tensor, **factors: float) -> torch.Tensor:
            multiply(*operands, out=out, **factors)
            return out.mul_(1 + len(out) % 101 / 128)

        return by_rows

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, choosy(getattr(torch, name)))
