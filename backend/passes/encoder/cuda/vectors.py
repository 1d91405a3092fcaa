"""The steps of heads between their products, with tensors of a GPU."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.passes.cuda.device.device import annotate_faults

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.encoders.encoder_config import PoolingMode
    from penstock.backend.passes.cuda.device.device import Device, Event


class DeviceVectors:
    """These methods of `EncoderOps`, and copies to and from the device. A row is summed by itself, in one order."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def send(self, values: NDArray[np.int32]) -> Tensor:
        """Start to copy values to the device."""
        host = self._device.pinned(values.size, torch.int32)
        host.numpy()[:] = values.ravel()
        # Page-locked memory that torch has allocated is not given away before the copies from it are done.
        return host.to(self._device.torch_device, non_blocking=True).view(values.shape)

    def pool(self, hidden: Tensor, rows: Sequence[tuple[int, int]], modes: tuple[PoolingMode, ...]) -> Tensor:
        ends = np.array(rows, np.int32)
        places = self.send(ends)
        lengths = self.send(ends[:, 1] - ends[:, 0])
        return torch.cat([self._pool(hidden, rows, places, lengths, mode) for mode in modes], dim=1)

    def _pool(
        self, hidden: Tensor, rows: Sequence[tuple[int, int]], places: Tensor, lengths: Tensor, mode: PoolingMode
    ) -> Tensor:
        match mode:
            case "cls":
                return hidden.index_select(0, places[:, 0])
            case "lasttoken":
                return hidden.index_select(0, places[:, 1] - 1)
        chosen = hidden
        if sum(end - start for start, end in rows) < len(hidden):
            chosen = torch.cat([hidden[start:end] for start, end in rows])
        counts = lengths[:, None]
        match mode:
            case "max":
                return _reduced(chosen, lengths, "max")
            case "mean":
                return _reduced(chosen, lengths, "sum") / counts
            case "mean_sqrt_len":
                return _reduced(chosen, lengths, "sum") / counts.sqrt()
        order = np.concatenate([np.arange(1, end - start + 1, dtype=np.int32) for start, end in rows])
        weighted = chosen * self.send(order)[:, None]
        return _reduced(weighted, lengths, "sum") / (counts * (counts + 1) / 2)

    def splade(self, blocks: Iterable[Tensor]) -> Tensor:
        top = torch.stack([block.amax(dim=0) for block in blocks]).amax(dim=0, keepdim=True)
        return top.relu_().log1p_()

    def fetch(self, vectors: Sequence[Tensor]) -> FetchedVectors:
        flat = torch.cat([each.reshape(-1) for each in vectors])
        host = self._device.pinned(len(flat), torch.float32)
        host.copy_(flat, non_blocking=True)
        shapes = [tuple(each.shape) for each in vectors]
        return FetchedVectors(self._device, host, self._device.record(), shapes)

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        with annotate_faults(self._device, doing):
            yield


@dataclass(frozen=True, slots=True)
class FetchedVectors:
    """Implements `Fetched`."""

    device: Device
    host: Tensor
    done: Event
    shapes: list[tuple[int, ...]]

    def wait(self) -> list[NDArray[np.float32]]:
        with annotate_faults(self.device, f"waiting for {len(self.shapes)} blocks of vectors"):
            self.done.synchronize()
        numbers: NDArray[np.float32] = self.host.numpy()
        parts = np.split(numbers[: sum(map(math.prod, self.shapes))], np.cumsum([*map(math.prod, self.shapes)])[:-1])
        return [part.reshape(shape).copy() for part, shape in zip(parts, self.shapes, strict=True)]


def _reduced(x: Tensor, lengths: Tensor, how: str) -> Tensor:
    """[rows, width]: the tokens of each row, added up in their order, or the largest. A NaN stays one."""
    reduced: Tensor = torch.segment_reduce(x, how, lengths=lengths, axis=0, unsafe=True)
    return reduced
