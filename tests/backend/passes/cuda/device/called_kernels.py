"""Loaded kernels that are Python functions: what the driver would get, without a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.backend.passes.cuda.device import cupy_launcher

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from penstock.backend.passes.cuda.device.launcher import Argument, Grid, Kernel


class CalledKernel:
    """Implements `DriverKernel`. Calls the loaded function with the grid, the block, the arguments with addresses
    for tensors, the shared memory and the stream."""

    def __init__(self, _driver: object, loaded: Callable[..., None], kernel: Kernel, _capability: object) -> None:
        self._loaded = loaded
        self._kernel = kernel

    def launch(
        self, grid: Grid, stream: int, arguments: tuple[Argument, ...], address_of: Callable[[Tensor], int]
    ) -> None:
        values: list[Any] = [address_of(each) if isinstance(each, Tensor) else each for each in arguments]
        self._loaded(grid, (self._kernel.num_threads,), tuple(values), self._kernel.shared_bytes, stream)


def call_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every `CupyLauncher` call its kernels, without the driver's library."""
    monkeypatch.setattr(cupy_launcher, "Driver", lambda: None)
    monkeypatch.setattr(cupy_launcher, "DriverKernel", CalledKernel)
