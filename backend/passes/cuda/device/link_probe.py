"""Measures how fast bytes travel between pinned host memory and the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.backend.passes.cuda.device.device import Device

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bytes per second."""

    to_device: float
    to_host: float

    def copy_s(self, num_bytes: int) -> float:
        """Return the seconds to copy num_bytes to the host and back."""
        return num_bytes / self.to_host + num_bytes / self.to_device

    def __str__(self) -> str:
        return f"{self.to_device / 1e9:.1f} GB/s to the GPU, {self.to_host / 1e9:.1f} GB/s back"


def measure_link(device: Device, num_bytes: int | None = None) -> LinkSpeed:
    """Return the best of a few copies in each direction, of device.link_probe_bytes if num_bytes is None. Takes about
    20 ms."""
    num_bytes = device.link_probe_bytes if num_bytes is None else num_bytes
    pinned = device.pinned(num_bytes, torch.uint8)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    speed = LinkSpeed(_best_speed(device, pinned, on_device), _best_speed(device, on_device, pinned))
    del pinned, on_device
    device.trim()
    return speed


def _best_speed(device: Device, source: Tensor, target: Tensor) -> float:
    best_s = float("inf")
    for _ in range(_REPEATS):
        device.synchronize()
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        device.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return len(source) / best_s
