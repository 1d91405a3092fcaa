"""A memfd or a file that one process fills with packed weights, and that later ones map; and the places where a pass
finds and leaves them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.weight_shapes import PackedShape
from penstock.backend.checkpoint.config_json import choose_dtype, read_declared_dtype
from penstock.backend.checkpoint.fingerprint import packing_fingerprint
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.quantization.modes import find_cpu_quantization, packed_linears, weight_bytes
from penstock.backend.checksum import block_sum
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cpu.library.cpu_paths import CpuPath
from penstock.backend.passes.cpu.library.native_structs import Linear
from penstock.backend.passes.cpu.weight_memory.anonymous import UnfilledMemory, aligned, request_huge_pages
from penstock.backend.passes.cpu.weight_memory.manifest import LinearForm, Manifest, PackedWeight, read_manifest
from penstock.backend.passes.shared_weights.blocks import (
    SharedWeightsError,
    WeightStore,
    block_place,
    changed,
    num_blocks,
)
from penstock.backend.passes.shared_weights.packed_file import PackedFile
from penstock.backend.passes.shared_weights.sealed_manifest import DATA_PLACE, finish
from penstock.backend.passes.shared_weights.sharing import find_shared
from penstock.process.private_directory import UnsafeDirectory
from penstock.shm.memory.fd_mailbox import FdMailbox, close_all

logger = logging.getLogger("penstock.backend")

_CHUNK_BYTES = 1 << 30
"""Address space that is mapped at a time. Each mapping holds a file descriptor."""
_MADV_POPULATE_READ = 22
"""Linux 5.14; the mmap module lacks the constant."""
_CHECKS_AT_START_S = 0.05


@dataclass(frozen=True, slots=True)
class CpuMemories:
    """Implements `sharing.Memories`: memory of the host. The first fd is all of it."""

    create: Callable[[], int]
    """Returns an fd of empty memory, which the caller closes. Raises OSError."""

    def fingerprint_of(self, fds: Sequence[int]) -> str:
        return read_manifest(fds[0])[1].fingerprint

    def map(self, fds: Sequence[int]) -> SharedMemory:
        try:
            return SharedMemory(fds[0])
        except OSError as error:
            raise SharedWeightsError(f"they cannot be mapped: {error.strerror}") from None

    def fill(self) -> FilledMemory:
        return FilledMemory(self.create())


def create_memfd() -> int:
    """Memory that ends with the last process that has it open."""
    return os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class FilledMemory(UnfilledMemory):
    """Memory that grows while weights are packed into it. `finish` makes it one that others can map."""

    def __init__(self, fd: int) -> None:
        """Owns fd."""
        self.fd = fd
        self._weights: list[PackedWeight] = []
        self._chunks: list[tuple[int, mmap.mmap]] = []
        """Place of its first byte, and the mapping."""
        self._end = 0

    def place(self, num_bytes: int, linear: Linear | None = None) -> NDArray[np.uint8]:
        """Raises OSError without memory."""
        begin, chunk = self._chunks[-1] if self._chunks else (0, None)
        if chunk is None or self._end + num_bytes > begin + len(chunk):
            page = mmap.ALLOCATIONGRANULARITY
            begin = self._end = -(-self._end // page) * page
            num_mapped = -(-max(num_bytes, _CHUNK_BYTES) // page) * page
            os.ftruncate(self.fd, DATA_PLACE + begin + num_mapped)
            chunk = request_huge_pages(mmap.mmap(self.fd, num_mapped, offset=DATA_PLACE + begin))
            self._chunks.append((begin, chunk))
        if num_bytes:
            # Allocated now: a page that cannot be allocated when it is written would kill the process.
            os.posix_fallocate(self.fd, DATA_PLACE + self._end, num_bytes)
        self._weights.append(PackedWeight(self._end, num_bytes, _form_of(linear)))
        array = np.frombuffer(chunk, np.uint8, num_bytes, self._end - begin)
        self._end += aligned(num_bytes)
        return array

    def used(self) -> list[NDArray[np.uint8]]:
        ends = [begin for begin, _ in self._chunks[1:]] + [self._end]
        return [
            np.frombuffer(chunk, np.uint8, end - begin) for (begin, chunk), end in zip(self._chunks, ends, strict=True)
        ]

    @property
    def fds(self) -> tuple[int]:
        return (self.fd,)

    def finish(self, fingerprint: str, dtype: Dtype) -> CpuBlocks:
        """Add the manifest, and make the memory read-only in all processes. Raises OSError or SharedWeightsError."""
        sums = tuple(_sum(self.fd, self._end, block) for block in range(num_blocks(self._end)))
        manifest = Manifest(fingerprint, dtype.value, tuple(self._weights), sums)  # type: ignore[arg-type]
        finish(self.fd, self._end, manifest)
        for _, chunk in self._chunks:
            _forbid_writing(chunk)
        return CpuBlocks(self.fd, self._end, sums)

    def keep(self) -> None:
        """Do nothing: its arrays keep it."""

    def close(self) -> None:
        """Its arrays stay valid."""
        os.close(self.fd)


class SharedMemory:
    """Weights that another process has packed, mapped for reading."""

    is_filled = True

    def __init__(self, fd: int) -> None:
        """The fd stays the caller's. Raises SharedWeightsError, and OSError if it cannot be mapped."""
        data_bytes, self._manifest = read_manifest(fd)
        self._next = 0
        self._mapping = request_huge_pages(mmap.mmap(fd, DATA_PLACE + data_bytes, prot=mmap.PROT_READ))
        self.num_bytes = data_bytes
        self.dtype = Dtype(self._manifest.dtype)
        self.blocks = CpuBlocks(fd, data_bytes, self._manifest.block_sums)

    def stand_in(self, shape: tuple[int, ...], _dtype: Dtype) -> PackedShape:
        return PackedShape(shape)

    def check_some(self) -> int:
        """Check some blocks, and map all pages now: mapping page by page in the first step costs several
        times as much."""
        end_s = time.monotonic() + _CHECKS_AT_START_S
        num_checked = 0
        for block in random.sample(range(len(self.blocks)), len(self.blocks)):
            self.blocks.check(block)
            num_checked += 1
            if time.monotonic() >= end_s:
                break
        with suppress(OSError):  # an older kernel
            self._mapping.madvise(_MADV_POPULATE_READ)
        return num_checked

    def give_form_to(self, linear: Linear) -> None:
        """Raises SharedWeightsError if the next weight is no linear that the kernels have."""
        form = self._peek().form
        if form is None:
            raise SharedWeightsError(f"weight {self._next} is no linear")
        form.give_to(linear)

    def holds_linear(self) -> bool:
        return self._peek().form is not None

    def place(self, num_bytes: int, linear: Linear | None = None) -> NDArray[np.uint8]:
        """Raises SharedWeightsError if the next weight differs."""
        weight = self._peek()
        if (weight.num_bytes, weight.form) != (num_bytes, _form_of(linear)):
            raise SharedWeightsError(f"weight {self._next} has {weight.num_bytes} bytes; expected are {num_bytes}")
        self._next += 1
        return np.frombuffer(self._mapping, np.uint8, num_bytes, DATA_PLACE + weight.place)

    def check_all_placed(self) -> None:
        """Raises SharedWeightsError if weights are left over."""
        if self._next < len(self._manifest.weights):
            raise SharedWeightsError(f"it has {len(self._manifest.weights)} weights; the model has {self._next}")

    def used(self) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(self._mapping, np.uint8, self.num_bytes, DATA_PLACE)]

    def unmap(self) -> None:
        """The mapping ends with the last array in it."""

    def _peek(self) -> PackedWeight:
        if self._next == len(self._manifest.weights):
            raise SharedWeightsError(f"it has only {self._next} weights")
        return self._manifest.weights[self._next]


class CpuBlocks:
    """Implements `SharedBlocks`."""

    def __init__(self, fd: int, num_bytes: int, sums: Sequence[int]) -> None:
        """Keeps its own fd until it is closed."""
        self.fd = os.dup(fd)
        self.num_bytes = num_bytes
        self._sums = sums

    def __len__(self) -> int:
        return len(self._sums)

    def check(self, block: int) -> None:
        if _sum(self.fd, self.num_bytes, block) != self._sums[block]:
            raise changed(*block_place(self.num_bytes, block))

    def close(self) -> None:
        os.close(self.fd)


def _form_of(linear: Linear | None) -> LinearForm | None:
    return None if linear is None else LinearForm.of(linear)


def _sum(fd: int, data_bytes: int, block: int) -> int:
    # Read, not mapped: pages that are mapped twice would count twice in this process's memory.
    place, num_bytes = block_place(data_bytes, block)
    content = np.empty(num_bytes, np.uint8)
    try:
        reason = "" if os.preadv(fd, [content.data], DATA_PLACE + place) == num_bytes else ": they are missing"
    except OSError as error:  # EIO: the memory itself is broken
        reason = f": {error.strerror}"
    if reason:
        raise SharedWeightsError(f"bytes {place} to {place + num_bytes} cannot be read{reason}")
    return block_sum(content)


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def _forbid_writing(mapping: mmap.mmap) -> None:
    """From now on a stray write ends the process, and does not change weights that others use."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(_address(mapping)), ctypes.c_size_t(len(mapping)), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), "mprotect failed")


@contextlib.contextmanager
def weight_places(
    model_dir: Path, config: DecoderConfig, options: PassOptions, path: CpuPath
) -> Iterator[list[tuple[WeightStore, CpuMemories]]]:
    """A file, if the weights are worth one, and the server's mailbox, if it has one."""
    places: list[tuple[WeightStore, CpuMemories]] = []
    file = packed_file(model_dir, config, options, path)
    if file is not None:
        places.append((file, CpuMemories(file.create)))
    with contextlib.ExitStack() as closer:
        if options.weights_fds is not None:
            mailbox = closer.enter_context(contextlib.closing(FdMailbox.attach(options.weights_fds)))
            places.append((mailbox, CpuMemories(create_memfd)))
        yield places


def fingerprint(model_dir: Path, config: DecoderConfig, options: PassOptions, path: CpuPath) -> str:
    return packing_fingerprint(model_dir, _settings(config, options, path))


def mapped_bytes(model_dir: Path, config: DecoderConfig, options: PassOptions, path: CpuPath) -> int:
    """Size of the weights in options.weights_fds that a pass with these options would map."""
    if options.weights_fds is None:
        return 0
    with contextlib.closing(FdMailbox.attach(options.weights_fds)) as mailbox:
        fds = find_shared(mailbox, fingerprint(model_dir, config, options, path), CpuMemories(create_memfd))
    try:
        return sum(os.fstat(fd).st_size for fd in fds)
    finally:
        close_all(fds)


def _settings(config: DecoderConfig, options: PassOptions, path: CpuPath) -> tuple[object, ...]:
    """What determines which weights are packed, and how."""
    return options.task, options.dtype, options.quantize, path.name, path.uses_tiles, config.has_mtp


def packed_file(model_dir: Path, config: DecoderConfig, options: PassOptions, path: CpuPath) -> PackedFile | None:
    """The file for weights with quantised linears; None for others, which are packed about as fast as a file is read
    and would take their size on the disk again."""
    quantization, formats = find_cpu_quantization(options.quantize), read_stored_formats(model_dir)
    if not packed_linears(config, quantization, formats):
        return None
    dtype = choose_dtype(options.dtype, read_declared_dtype(model_dir) or Dtype.BF16)
    num_bytes = weight_bytes(config, dtype, quantization, formats)
    try:
        return PackedFile.of(model_dir, _settings(config, options, path), num_bytes)
    except (OSError, UnsafeDirectory) as error:
        logger.warning("the packed weights cannot be kept: %s; the next start packs them again", error)
        return None
