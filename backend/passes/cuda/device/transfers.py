"""Asynchronous copies between host and device: int32 arrays packed into one copy each way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cuda.device.device import Device, Event

Ints = NDArray[np.int32]

_NUM_BLOCKS = 2


def aligned(num_ints: int) -> int:
    """Round up to a multiple of 16 bytes."""
    return -(-num_ints // 4) * 4


class _HostBlock:
    """Pinned memory, and the event after which the device no longer uses it."""

    def __init__(self, device: Device, num_ints: int) -> None:
        self.tensor = device.pinned(num_ints, torch.int32)
        self.ints: Ints = self.tensor.numpy()
        self.address: int = self.ints.ctypes.data
        self.done: Event | None = None


class Uplink:
    """One block of device memory, and pinned host blocks that are written in turn.

    The device block keeps its contents until the next `send` or `copy`, which runs after all kernels launched before.
    """

    def __init__(self, device: Device, num_ints: int) -> None:
        self._device = device
        self._hosts = deque(_HostBlock(device, num_ints) for _ in range(_NUM_BLOCKS))
        self.block = torch.zeros(num_ints, dtype=torch.int32, device=device.torch_device)
        self.num_ints = num_ints

    def open(self) -> _HostBlock:
        """Return the host block to write before `copy`. Waits until the device has read it: it is that of the second
        last `copy`."""
        host = self._hosts[0]
        if host.done is not None:
            host.done.synchronize()
        return host

    def copy(self, num_ints: int) -> None:
        """Copy the start of the opened host block to that of the device's."""
        host = self._hosts[0]
        self._hosts.rotate(-1)
        self.block[:num_ints].copy_(host.tensor[:num_ints], non_blocking=True)
        host.done = self._device.record(host.done)

    def send(self, parts: Sequence[Ints]) -> list[Tensor]:
        """Copy the parts to the start of the block, each at a multiple of 16 bytes, and return them there, flat.

        Raises ValueError if the parts do not fit.
        """
        sizes = [part.size for part in parts]
        starts = [0, *accumulate(map(aligned, sizes))]
        if starts[-1] > self.num_ints:
            raise ValueError(f"cannot send {starts[-1]} ints; the block holds {self.num_ints}")
        host = self.open()
        for part, start, size in zip(parts, starts, sizes, strict=False):
            host.ints[start : start + size] = part.ravel()
        self.copy(starts[-1])
        return [self.block[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class Downlink:
    """A block of device memory that kernels write, and pinned copies of it, one per step in flight."""

    def __init__(self, device: Device, num_ints: int) -> None:
        self._device = device
        self._free = deque([_HostBlock(device, num_ints) for _ in range(_NUM_BLOCKS)])
        self.block = torch.zeros(num_ints, dtype=torch.int32, device=device.torch_device)

    def fetch(self, num_ints: int) -> PendingCopy:
        """Start to copy the first num_ints of the block, after all kernels launched so far."""
        host = self._free.popleft() if self._free else _HostBlock(self._device, self.block.shape[0])
        host.tensor[:num_ints].copy_(self.block[:num_ints], non_blocking=True)
        host.done = self._device.record(host.done)
        return PendingCopy(host, num_ints, self._free)


class PendingCopy:
    """A copy to the host that may not have finished."""

    def __init__(self, host: _HostBlock, num_ints: int, free: deque[_HostBlock]) -> None:
        self._host = host
        self._num_ints = num_ints
        self._free = free

    def wait(self) -> Ints:
        """Block until the copy is done and return it. Call once, from any thread. Raises the device's error."""
        host = self._host
        if host.done is not None:
            host.done.synchronize()
        ints = host.ints[: self._num_ints].copy()
        self._free.append(host)
        return ints
