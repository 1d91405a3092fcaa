"""The common parts of all shared weights: blocks with checksums, the place where they are left, and an error for
unusable ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

BLOCK_BYTES = 4 << 20
"""Size of a block with its own checksum; the last block may be smaller."""


class SharedWeightsError(Exception):
    """Shared memory has wrong content. The message is one line."""


class SharedBlocks(Protocol):
    """The blocks of finished memory, and their checksums."""

    @property
    def fd(self) -> int:
        """The first fd in the mailbox, which identifies the content."""

    @property
    def num_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def check(self, block: int) -> None:
        """Any thread may call it. Raises SharedWeightsError if the block has changed."""

    def close(self) -> None: ...


class WeightStore(Protocol):
    """The place where processes leave and find weights: `FdMailbox` or `PackedFile`."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from entering the block."""

    def find(self) -> Sequence[int]:
        """New fds of the content, which the caller closes; empty if there is none."""

    def leave(self, fds: Sequence[int]) -> None:
        """Replace the content by fds, which stay the caller's too. Raises OSError."""

    def clear(self) -> None:
        """Remove the content. Other processes keep what they have found."""

    def holds(self, fd: int) -> bool:
        """Whether the first fd of the content is the same file as fd."""

    @property
    def is_empty(self) -> bool: ...

    def duplicate(self) -> Self:
        """Open the same store again."""

    def close(self) -> None: ...


def num_blocks(data_bytes: int) -> int:
    return -(-data_bytes // BLOCK_BYTES)


def block_place(data_bytes: int, block: int) -> tuple[int, int]:
    """Return where a block begins, and its size."""
    begin = block * BLOCK_BYTES
    return begin, min(BLOCK_BYTES, data_bytes - begin)


def changed(begin: int, num_bytes: int) -> SharedWeightsError:
    return SharedWeightsError(f"bytes {begin} to {begin + num_bytes} have changed")
