"""What lies in held memory: a header, the weights, and at the end a manifest that says how they are packed.

The memory is private to a server's processes, but damage to it must not become a wrong address: everything is checked
before it is used.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec

from penstock.backend.passes.decoder.cpu.native_structs import WeightForm
from penstock.shm.memory import region

if TYPE_CHECKING:
    from penstock.backend.passes.decoder.cpu.native_structs import Linear

DATA_PLACE = 4096
"""Where the weights begin."""
BLOCK_BYTES = 4 << 20
"""The weights have a checksum for each block of this size; the last block may be smaller."""
_MAGIC = 0x50_4E_53_54_57_47_54_31
_HEADER = struct.Struct("<QQQQ")  # magic, bytes of weights, bytes of the manifest, its crc32
_MAX_MANIFEST_BYTES = 64 << 20

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class HeldWeightsError(Exception):
    """Held memory does not hold what it should. The message is one line."""


class LinearForm(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `native_structs.Linear` that depend on the checkpoint's numbers or on their quantisation."""

    form: Annotated[int, msgspec.Meta(ge=0, le=4)] = 0
    group_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    int4_kind: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    block_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    has_minima: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0

    @classmethod
    def of(cls, linear: Linear) -> Self:
        return cls(linear.form, linear.group_size, linear.int4_kind, linear.block_size, linear.has_minima)

    def give_to(self, linear: Linear) -> None:
        """Raises HeldWeightsError if the kernels do not have this form for a linear of this size."""
        groups = {WeightForm.INT4: (self.group_size,), WeightForm.GROUPED4: (self.group_size, self.block_size)}
        groups[WeightForm.GROUPED8] = groups[WeightForm.GROUPED4]
        for size in groups.get(WeightForm(self.form), ()):
            if size == 0 or linear.inputs % size:
                raise HeldWeightsError(f"groups of {size} in a linear of {linear.inputs} inputs")
        linear.form, linear.group_size, linear.int4_kind = self.form, self.group_size, self.int4_kind
        linear.block_size, linear.has_minima = self.block_size, self.has_minima


class PackedWeight(msgspec.Struct, frozen=True, array_like=True):
    """Weights lie in the order in which they are packed."""

    place: Size
    num_bytes: Size
    form: LinearForm | None
    """None if it is no linear."""


class Manifest(msgspec.Struct, frozen=True):
    fingerprint: str
    dtype: Literal["bf16", "fp32"]
    weights: tuple[PackedWeight, ...]
    block_sums: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...]


def finish(fd: int, data_bytes: int, manifest: Manifest) -> None:
    """Write header and manifest behind data_bytes of weights, and forbid all changes. Raises OSError."""
    text = msgspec.json.encode(manifest)
    end = DATA_PLACE + data_bytes
    os.ftruncate(fd, end)
    os.pwrite(fd, text, end)
    os.pwrite(fd, _HEADER.pack(_MAGIC, data_bytes, len(text), zlib.crc32(text)), 0)
    region.seal(fd, region.F_SEAL_FUTURE_WRITE)


def read_manifest(fd: int) -> tuple[int, Manifest]:
    """Return the bytes of weights, and the manifest. Raises HeldWeightsError."""
    try:
        region.attach(fd, DATA_PLACE, writable=False).close()  # sealed, so it cannot shrink later
        magic, data_bytes, num_bytes, crc = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        size = os.fstat(fd).st_size
        if magic != _MAGIC or num_bytes > _MAX_MANIFEST_BYTES or DATA_PLACE + data_bytes + num_bytes != size:
            raise HeldWeightsError(
                f"{size} bytes have a header for {data_bytes} of weights and {num_bytes} of manifest"
            )
        text = os.pread(fd, num_bytes, DATA_PLACE + data_bytes)
        if zlib.crc32(text) != crc:
            raise HeldWeightsError("the manifest's checksum does not match")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise HeldWeightsError(str(error)) from None
    _check(data_bytes, manifest)
    return data_bytes, manifest


def _check(data_bytes: int, manifest: Manifest) -> None:
    end = 0
    for number, weight in enumerate(manifest.weights):
        if weight.place < end or weight.place % 64 or weight.place + weight.num_bytes > data_bytes:
            raise HeldWeightsError(
                f"weight {number} of {weight.num_bytes} bytes at {weight.place} does not lie behind {end} within "
                f"{data_bytes} bytes"
            )
        end = weight.place + weight.num_bytes
    if data_bytes % 64 or len(manifest.block_sums) != -(-data_bytes // BLOCK_BYTES):
        raise HeldWeightsError(f"{len(manifest.block_sums)} checksums for {data_bytes} bytes")
