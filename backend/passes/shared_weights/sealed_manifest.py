"""A description of shared weights, at the end of a file or of a memfd that nobody can change any more.

The memory is private to a user's processes, but damage to it must not become a wrong address: everything is checked
before it is used.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TypeVar

import msgspec

from penstock.backend.passes.shared_weights.blocks import SharedWeightsError
from penstock.shm.memory import region

DATA_PLACE = 4096
"""Offset of the described content, if it is in the memfd too."""
MAGIC = 0x50_4E_53_54_57_47_54_32
HEADER = struct.Struct("<QQQQ")  # magic, bytes of content, bytes of the manifest, its crc32
_MAX_MANIFEST_BYTES = 64 << 20

ManifestT = TypeVar("ManifestT", bound=msgspec.Struct)


def finish(fd: int, data_bytes: int, manifest: msgspec.Struct) -> None:
    """Write header and manifest behind data_bytes of content; forbid all changes of a memfd. Raises OSError."""
    text = msgspec.json.encode(manifest)
    end = DATA_PLACE + data_bytes
    os.ftruncate(fd, end)
    os.pwrite(fd, text, end)
    os.pwrite(fd, HEADER.pack(MAGIC, data_bytes, len(text), zlib.crc32(text)), 0)
    if _is_memfd(fd):
        region.seal(fd, region.F_SEAL_FUTURE_WRITE)


def read_manifest(fd: int, of: type[ManifestT]) -> tuple[int, ManifestT]:
    """Return the bytes of content, and the manifest. Raises SharedWeightsError."""
    try:
        if _is_memfd(fd):
            region.attach(fd, DATA_PLACE, writable=False).close()  # sealed, so it cannot shrink later
        magic, data_bytes, num_bytes, crc = HEADER.unpack(os.pread(fd, HEADER.size, 0))
        size = os.fstat(fd).st_size
        if magic != MAGIC or num_bytes > _MAX_MANIFEST_BYTES or DATA_PLACE + data_bytes + num_bytes != size:
            raise SharedWeightsError(
                f"{size} bytes have a header for {data_bytes} of weights and {num_bytes} of manifest"
            )
        text = os.pread(fd, num_bytes, DATA_PLACE + data_bytes)
        if zlib.crc32(text) != crc:
            raise SharedWeightsError("the manifest's checksum does not match")
        return data_bytes, msgspec.json.decode(text, type=of)
    except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
        raise SharedWeightsError(str(error)) from None


def _is_memfd(fd: int) -> bool:
    """Whether no file system has a name for it. A file has one, in a directory that only this user can write."""
    return os.fstat(fd).st_nlink == 0
