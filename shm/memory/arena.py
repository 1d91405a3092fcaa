"""Shared memory for prompts that are too long for a message: a frontend writes slots, the backend copies them out.

The frontend owns the free list. A slot is in use from `write` until the backend's first event for that request: by then
the backend has copied the tokens. A write invalidates the slot first and writes the header last, so a writer that dies
at any moment leaves nothing valid. The reader checks its copy, never the shared memory.
"""

from __future__ import annotations

import mmap
import struct
import zlib

from penstock.shm.memory import region
from penstock.shm.messages import MAX_INLINE_PROMPT_TOKENS, ArenaRef

_HEADER = struct.Struct("=IIQQQ")  # magic, crc32, epoch, sequence, length
_COVERED = struct.Struct("=QQQ")  # epoch, sequence, length: what the crc covers beside the payload
_MAGIC = 0x50_53_41_31
_INVALID = bytes(_HEADER.size)

_PAGE_BYTES = 4096
_TARGET_BYTES = 16 << 20
_MIN_SLOTS = 4
_MAX_SLOTS = 32


class ArenaFull(Exception):
    """All slots are in use."""


class DescriptorError(ValueError):
    """The descriptor does not name a complete, current payload of its epoch."""


def geometry(max_context_tokens: int) -> tuple[int, int]:
    """(slots, bytes per slot); a slot holds a full context of int32 tokens."""
    if max_context_tokens <= MAX_INLINE_PROMPT_TOKENS:
        return 1, _PAGE_BYTES
    slot_bytes = -(-(_HEADER.size + 4 * max_context_tokens) // _PAGE_BYTES) * _PAGE_BYTES
    return min(_MAX_SLOTS, max(_MIN_SLOTS, _TARGET_BYTES // slot_bytes)), slot_bytes


def create_fd(num_slots: int, slot_bytes: int) -> int:
    """A sealed region of zeroes for one frontend; the caller closes the fd. Raises OSError: no memory."""
    fd = region.create("penstock-arena", num_slots * slot_bytes)
    region.seal(fd)
    return fd


def _crc(epoch: int, sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_COVERED.pack(epoch, sequence, len(payload))))


class Arena:
    """The frontend's side."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int, epoch: int) -> None:
        """The fd stays the caller's. Raises RegionError."""
        self._mapping = region.attach(fd, num_slots * slot_bytes, writable=True)
        self._slot_bytes = slot_bytes
        self._epoch = epoch
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[int, int] = {}  # slot → sequence of the payload it holds
        self._next_sequence = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the longest payload."""
        return self._slot_bytes - _HEADER.size

    @property
    def slots_in_use(self) -> int:
        return len(self._held)

    def write(self, payload: bytes) -> ArenaRef:
        """Raises ArenaFull when all slots are in use, ValueError for a payload that no slot can hold."""
        if not 4 <= len(payload) <= self.capacity_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes; a slot holds 4 to {self.capacity_bytes} bytes")
        if not self._free:
            raise ArenaFull
        slot = self._free.pop()
        sequence = self._next_sequence
        self._next_sequence += 1
        self._held[slot] = sequence
        start = slot * self._slot_bytes
        self._invalidate(start)
        self._write_payload(start, payload)
        self._write_header(start, sequence, payload)
        return ArenaRef(slot=slot, sequence=sequence, num_bytes=len(payload))

    def _invalidate(self, start: int) -> None:
        self._mapping[start : start + _HEADER.size] = _INVALID

    def _write_payload(self, start: int, payload: bytes) -> None:
        self._mapping[start + _HEADER.size : start + _HEADER.size + len(payload)] = payload

    def _write_header(self, start: int, sequence: int, payload: bytes) -> None:
        crc = _crc(self._epoch, sequence, payload)
        _HEADER.pack_into(self._mapping, start, _MAGIC, crc, self._epoch, sequence, len(payload))

    def free(self, ref: ArenaRef) -> bool:
        """Free the slot. False if it is free already or holds a later payload."""
        if self._held.get(ref.slot) != ref.sequence:
            return False
        del self._held[ref.slot]
        self._free.append(ref.slot)
        return True

    def close(self) -> None:
        self._mapping.close()


class ArenaReader:
    """The backend's side of one frontend's arena."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int, epoch: int) -> None:
        """The fd stays the caller's. Raises RegionError."""
        self._mapping: mmap.mmap = region.attach(fd, num_slots * slot_bytes, writable=False)
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._epoch = epoch

    def read(self, ref: ArenaRef) -> bytes:
        """Copy the payload, then check the copy. Raises DescriptorError."""
        if not 0 <= ref.slot < self._num_slots:
            raise DescriptorError(f"slot {ref.slot}; the arena has {self._num_slots} slots")
        if not 0 < ref.num_bytes <= self._slot_bytes - _HEADER.size:
            raise DescriptorError(f"{ref.num_bytes} bytes; a slot holds {self._slot_bytes - _HEADER.size} bytes")
        start = ref.slot * self._slot_bytes
        copy = self._mapping[start : start + _HEADER.size + ref.num_bytes]
        magic, crc, epoch, sequence, length = _HEADER.unpack_from(copy)
        payload = copy[_HEADER.size :]
        if (magic, epoch, sequence, length) != (_MAGIC, self._epoch, ref.sequence, ref.num_bytes):
            raise DescriptorError(f"slot {ref.slot} does not hold payload {ref.sequence} of {ref.num_bytes} bytes")
        if crc != _crc(epoch, sequence, payload):
            raise DescriptorError(f"slot {ref.slot}: payload {ref.sequence} has another checksum")
        return payload

    def close(self) -> None:
        self._mapping.close()
