"""Shared memory for prompts that are too long for a message, and for pixels: a frontend writes slots, the backend
copies them out.

The frontend owns the slots. Tokens are in use from `write` until the backend's first event for that request: by then
the backend has copied them. Pixels take several slots in a row, behind those of tokens, until their request ends. A
write invalidates the slot first and writes the header last, so a writer that dies at any moment leaves nothing valid.
The reader checks its copy, never the shared memory.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterable

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


_MIN_PICTURE_SLOT_BYTES = 64 << 10
_PICTURES = 16
"""Largest pictures that fit at the same time. Memory that was never written takes no room."""
_COPY_BYTES = 1 << 20
"""A copy holds the interpreter's lock, which others need within a millisecond."""


class ArenaFull(Exception):
    """Too few slots are free."""


class DescriptorError(ValueError):
    """The descriptor does not name a complete, current payload of its epoch."""


def geometry(max_context_tokens: int, max_picture_bytes: int = 0) -> tuple[int, int, int]:
    """(slots, bytes per slot, first slots for tokens alone); a slot holds a full context of int32 tokens."""
    num_token_slots, slot_bytes = 1, _PAGE_BYTES
    if max_context_tokens > MAX_INLINE_PROMPT_TOKENS:
        slot_bytes = -(-(_HEADER.size + 4 * max_context_tokens) // _PAGE_BYTES) * _PAGE_BYTES
        num_token_slots = min(_MAX_SLOTS, max(_MIN_SLOTS, _TARGET_BYTES // slot_bytes))
    if not max_picture_bytes:
        return num_token_slots, slot_bytes, num_token_slots
    slot_bytes = max(slot_bytes, _MIN_PICTURE_SLOT_BYTES)
    num_slots = num_token_slots + _PICTURES * -(-(_HEADER.size + max_picture_bytes) // slot_bytes)
    return num_slots, slot_bytes, num_token_slots


def create_fd(num_slots: int, slot_bytes: int) -> int:
    """A sealed region of zeroes for one frontend; the caller closes the fd. Raises OSError: no memory."""
    fd = region.create("penstock-arena", num_slots * slot_bytes)
    region.seal(fd)
    return fd


def _crc(epoch: int, sequence: int, length: int, payload: bytes | memoryview) -> int:
    """Pixels are left out, as their payload: they have a digest of their own."""
    return zlib.crc32(payload, zlib.crc32(_COVERED.pack(epoch, sequence, length)))


class Arena:
    """The frontend's side."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int, epoch: int, num_token_slots: int = 0) -> None:
        """The slots behind the first num_token_slots are for pixels; 0 for none. The fd stays the caller's. Raises
        RegionError."""
        self._mapping = region.attach(fd, num_slots * slot_bytes, writable=True)
        self._slot_bytes = slot_bytes
        self._epoch = epoch
        self._num_token_slots = num_token_slots or num_slots
        self._used = bytearray(num_slots)
        """1 for each slot in use."""
        self._held: dict[int, tuple[int, int]] = {}  # first slot → (number of slots, sequence) of the payload there
        self._next_sequence = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the longest payload."""
        return self._slot_bytes - _HEADER.size

    @property
    def slots_in_use(self) -> int:
        return sum(self._used)

    def write(self, payload: bytes) -> ArenaRef:
        """Raises ArenaFull when all slots are in use, ValueError for a payload that no slot can hold."""
        if not 4 <= len(payload) <= self.capacity_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes; a slot holds 4 to {self.capacity_bytes} bytes")
        return self._write(self._used.find(0, 0, self._num_token_slots), 1, payload, payload)

    def has_room(self, sizes: Iterable[int], *, when_empty: bool = False) -> bool:
        """Whether `write_pixels` would find room for payloads of these sizes now, or if it held no others."""
        used = bytearray(len(self._used)) if when_empty else self._used[:]
        for count in map(self._slots_for, sizes):
            if (slot := used.find(bytes(count), self._num_token_slots)) < 0:
                return False
            used[slot : slot + count] = b"\1" * count
        return True

    def write_pixels(self, payload: bytes) -> ArenaRef:
        """Raises ArenaFull when too few slots in a row are free."""
        count = self._slots_for(len(payload))
        return self._write(self._used.find(bytes(count), self._num_token_slots), count, payload, b"")

    def _slots_for(self, num_bytes: int) -> int:
        return -(-(_HEADER.size + num_bytes) // self._slot_bytes)

    def _write(self, slot: int, count: int, payload: bytes, covered: bytes) -> ArenaRef:
        """slot is the first of count, -1 for none. covered is what the checksum covers of the payload."""
        if slot < 0:
            raise ArenaFull
        sequence = self._next_sequence
        self._next_sequence += 1
        self._held[slot] = count, sequence
        self._used[slot : slot + count] = b"\1" * count
        start = slot * self._slot_bytes
        self._invalidate(start)
        self._write_payload(start, payload)
        self._write_header(start, sequence, len(payload), covered)
        return ArenaRef(slot=slot, sequence=sequence, num_bytes=len(payload))

    def _invalidate(self, start: int) -> None:
        self._mapping[start : start + _HEADER.size] = _INVALID

    def _write_payload(self, start: int, payload: bytes) -> None:
        self._mapping[start + _HEADER.size : start + _HEADER.size + len(payload)] = payload

    def _write_header(self, start: int, sequence: int, length: int, covered: bytes) -> None:
        crc = _crc(self._epoch, sequence, length, covered)
        _HEADER.pack_into(self._mapping, start, _MAGIC, crc, self._epoch, sequence, length)

    def free(self, ref: ArenaRef) -> bool:
        """Free the slots. False if they are free already or hold a later payload."""
        count, sequence = self._held.get(ref.slot, (0, -1))
        if sequence != ref.sequence:
            return False
        del self._held[ref.slot]
        self._used[ref.slot : ref.slot + count] = bytes(count)
        if ref.slot >= self._num_token_slots:  # much memory, which may not be needed soon
            self._mapping.madvise(mmap.MADV_REMOVE, ref.slot * self._slot_bytes, count * self._slot_bytes)
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
        return bytes(self._read(ref, 1))

    def read_pixels(self, ref: ArenaRef) -> memoryview:
        """`read` for any thread. The caller compares the pixels with their digest."""
        return self._read(ref, self._num_slots)

    def _read(self, ref: ArenaRef, max_slots: int) -> memoryview:
        if not 0 <= ref.slot < self._num_slots:
            raise DescriptorError(f"slot {ref.slot}; the arena has {self._num_slots} slots")
        num_held = min(max_slots, self._num_slots - ref.slot) * self._slot_bytes - _HEADER.size
        if not 0 < ref.num_bytes <= num_held:
            raise DescriptorError(f"{ref.num_bytes} bytes; slots from {ref.slot} on hold {num_held} bytes")
        start, size = ref.slot * self._slot_bytes, _HEADER.size + ref.num_bytes
        copy = memoryview(bytearray(size))
        try:
            for at in range(0, size, _COPY_BYTES):
                copy[at : at + _COPY_BYTES] = self._mapping[start + at : start + min(at + _COPY_BYTES, size)]
        except ValueError as error:  # closed, by another thread
            raise DescriptorError(str(error)) from None
        magic, crc, epoch, sequence, length = _HEADER.unpack_from(copy)
        payload = copy[_HEADER.size :].toreadonly()
        if (magic, epoch, sequence, length) != (_MAGIC, self._epoch, ref.sequence, ref.num_bytes):
            raise DescriptorError(f"slot {ref.slot} does not hold payload {ref.sequence} of {ref.num_bytes} bytes")
        if crc != _crc(epoch, sequence, length, payload if max_slots == 1 else b""):
            raise DescriptorError(f"slot {ref.slot}: payload {ref.sequence} has another checksum")
        return payload

    def close(self) -> None:
        self._mapping.close()
