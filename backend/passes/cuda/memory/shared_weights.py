"""Blocks of the GPU's memory that one process fills with packed weights, and that later ones map.

The mailbox keeps a memfd with the manifest, and behind it the descriptors of the blocks. As long as one of them is open
somewhere, the memory exists; no process owns it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.quantized_forms import WeightForm
from penstock.backend.checksum import COLUMNS, block_sum, crc_of
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cuda.device.device import BlockRange, Device
from penstock.backend.passes.cuda.memory.weight_manifest import (
    ALIGNMENT,
    DTYPES,
    DeviceManifest,
    SharedForm,
    SharedTensor,
    SharedWeight,
    dtype_name,
    read_manifest,
)
from penstock.backend.passes.shared_weights import sealed_manifest
from penstock.backend.passes.shared_weights.blocks import (
    BLOCK_BYTES,
    SharedWeightsError,
    block_place,
    changed,
    num_blocks,
)
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.memory.fd_mailbox import close_all

_MORE_BYTES = 32 << 20
"""Size of further blocks, if the first one is too small."""
_SUMS_AT_ONCE = 64
"""Blocks whose sums are computed together."""


class DeviceMemories:
    """Implements `sharing.Memories`: blocks of a GPU's memory."""

    def __init__(self, device: Device, planned_bytes: int) -> None:
        """planned_bytes is the announced size of the weights; the first block has this size."""
        self._device = device
        self._planned_bytes = planned_bytes

    def fingerprint_of(self, fds: Sequence[int]) -> str:
        return fingerprint_of(fds)

    def map(self, fds: Sequence[int]) -> SharedDeviceMemory:
        return SharedDeviceMemory(self._device, fds)

    def fill(self) -> FilledDeviceMemory:
        return FilledDeviceMemory(self._device, self._planned_bytes)


def fingerprint_of(fds: Sequence[int]) -> str:
    """Raises SharedWeightsError."""
    return read_manifest(fds[0], len(fds) - 1).fingerprint


def mapped_bytes(fds: Sequence[int]) -> int:
    """Device memory that these weights take. Raises SharedWeightsError."""
    return sum(read_manifest(fds[0], len(fds) - 1).block_bytes)


class FilledDeviceMemory:
    """Implements `DeviceMemory`, `sharing.FilledMemory`. Tensors are made in torch's memory and copied to
    their place."""

    is_filled = False

    def __init__(self, device: Device, planned_bytes: int) -> None:
        """Raises DeviceError if the driver does not provide such memory."""
        self._device = device
        self._range: BlockRange = device.block_range(2 * planned_bytes + _MORE_BYTES)
        self._block_fds: list[int] = []
        self._manifest_fd: int | None = None
        self._weights: list[SharedWeight] = []
        self._end = 0
        self._is_kept = False
        try:
            self._add_block(planned_bytes)
        except BaseException:
            self._range.close()
            raise

    def place(self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        tensor, shared = self._put(make())
        self._weights.append(SharedWeight((shared,), None))
        return tensor

    def place_parts(self, form: WeightForm, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        placed = [self._put(part) for part in parts]
        self._weights.append(SharedWeight(tuple(shared for _, shared in placed), SharedForm.of(form)))
        return tuple(tensor for tensor, _ in placed)

    def find_parts(self) -> None:
        raise TypeError("nothing is found in memory that is not filled yet; this is a bug")

    def _put(self, made: Tensor) -> tuple[Tensor, SharedTensor]:
        shared = SharedTensor(self._end, dtype_name(made.dtype), tuple(made.shape))
        missing = self._end + shared.num_bytes - sum(self._range.block_bytes)
        if missing > 0:
            self._add_block(max(missing, _MORE_BYTES))
        tensor = _view(self._range, shared)
        tensor.copy_(made)
        self._end += -(-shared.num_bytes // ALIGNMENT) * ALIGNMENT
        return tensor, shared

    def _add_block(self, num_bytes: int) -> None:
        self._block_fds.append(self._range.add(num_bytes))

    @property
    def fds(self) -> tuple[int, ...]:
        if self._manifest_fd is None:
            raise RuntimeError("the memory is not finished; this is a bug")
        return self._manifest_fd, *self._block_fds

    def finish(self, fingerprint: str, dtype: Dtype) -> DeviceHeldBlocks:
        """Raises OSError or DeviceError."""
        self._device.trim()  # what the weights were made in
        sums = tuple(_sums(self._range, self._end))
        block_bytes = tuple(self._range.block_bytes)
        manifest = DeviceManifest(fingerprint, dtype.value, self._end, block_bytes, tuple(self._weights), sums)
        self._manifest_fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        sealed_manifest.finish(self._manifest_fd, 0, manifest)
        return DeviceHeldBlocks(self._range, self._manifest_fd, self._end, sums)

    def keep(self) -> None:
        self._is_kept = True

    def close(self) -> None:
        close_all(self._block_fds)
        self._block_fds.clear()
        if self._manifest_fd is not None:
            os.close(self._manifest_fd)
            self._manifest_fd = None
        if not self._is_kept:
            self.unmap()

    def unmap(self) -> None:
        self._device.synchronize()
        self._range.close()


class SharedDeviceMemory:
    """Implements `DeviceMemory`, `sharing.MappedMemory`."""

    is_filled = True

    def __init__(self, device: Device, fds: Sequence[int]) -> None:
        """The fds stay the caller's. Raises SharedWeightsError."""
        manifest_fd, *block_fds = fds
        self._manifest = read_manifest(manifest_fd, len(block_fds))
        self._next = 0
        self.dtype = Dtype(self._manifest.dtype)
        try:
            self._range: BlockRange = device.block_range(sum(self._manifest.block_bytes))
            try:
                for fd, num_bytes in zip(block_fds, self._manifest.block_bytes, strict=True):
                    self._range.map(fd, num_bytes)
            except DeviceError:
                self._range.close()
                raise
        except DeviceError as error:
            raise SharedWeightsError(str(error)) from None
        self.blocks = DeviceHeldBlocks(self._range, manifest_fd, self._manifest.data_bytes, self._manifest.sums)

    def stand_in(self, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype.in_torch, device="meta")

    def check_some(self) -> int:
        """Check all blocks: the device reads them in milliseconds."""
        for block, found in enumerate(_sums(self._range, self._manifest.data_bytes)):
            if found != self._manifest.sums[block]:
                raise changed(*block_place(self._manifest.data_bytes, block))
        return len(self.blocks)

    def place(self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        weight = self._take()
        (shared,) = weight.tensors[:1]
        if weight.form is not None or shared.shape != tuple(shape) or DTYPES[shared.dtype] is not dtype:
            raise SharedWeightsError(
                f"weight {self._next} is {shared.dtype} {shared.shape}; expected is {dtype} {shape}"
            )
        return _view(self._range, shared)

    def place_parts(self, form: WeightForm, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG002
        raise TypeError("the weights are there already; this is a bug")

    def find_parts(self) -> tuple[WeightForm, tuple[Tensor, ...]] | None:
        if self._next == len(self._manifest.weights):
            raise SharedWeightsError(f"it has only {self._next} weights")
        form = self._manifest.weights[self._next].form
        if form is None:
            return None
        return form.read(), tuple(_view(self._range, shared) for shared in self._take().tensors)

    def _take(self) -> SharedWeight:
        if self._next == len(self._manifest.weights):
            raise SharedWeightsError(f"it has only {self._next} weights")
        self._next += 1
        return self._manifest.weights[self._next - 1]

    def check_all_placed(self) -> None:
        if self._next < len(self._manifest.weights):
            raise SharedWeightsError(f"it has {len(self._manifest.weights)} weights; the model has {self._next}")

    def unmap(self) -> None:
        self._range.close()


class DeviceHeldBlocks:
    """Implements `SharedBlocks`. A check copies its block to the host, beside the running step."""

    def __init__(self, memory: BlockRange, fd: int, num_bytes: int, sums: Sequence[int]) -> None:
        """Keeps its own fd until it is closed."""
        self.fd = os.dup(fd)
        self.num_bytes = num_bytes
        self._range = memory
        self._sums = sums

    def __len__(self) -> int:
        return len(self._sums)

    def check(self, block: int) -> None:
        """Raises SharedWeightsError for other bytes, and DeviceError if the device is lost."""
        begin, num_bytes = block_place(self.num_bytes, block)
        content = self._range.read(begin, num_bytes)
        if block_sum(np.frombuffer(content, np.uint8)) != self._sums[block]:
            raise changed(begin, num_bytes)

    def close(self) -> None:
        os.close(self.fd)


def _view(memory: BlockRange, shared: SharedTensor) -> Tensor:
    return memory.tensor(shared.place, shared.num_bytes).view(DTYPES[shared.dtype]).view(shared.shape)


def _sums(memory: BlockRange, data_bytes: int) -> Iterator[int]:
    """`block_sum` of each block, added up on the device."""
    whole = data_bytes // BLOCK_BYTES
    for first in range(0, whole, _SUMS_AT_ONCE):
        count = min(_SUMS_AT_ONCE, whole - first)
        tables = memory.tensor(first * BLOCK_BYTES, count * BLOCK_BYTES).view(torch.int64).view(count, -1, COLUMNS)
        columns, rows = tables.sum(1).cpu().numpy(), tables.sum(2).cpu().numpy()
        for block in range(count):
            yield crc_of(columns[block], rows[block])
    for block in range(whole, num_blocks(data_bytes)):
        begin, num_bytes = block_place(data_bytes, block)
        yield block_sum(memory.tensor(begin, num_bytes).cpu().numpy())
