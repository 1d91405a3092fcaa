"""The common parts of all held weights: blocks with checksums, and an error for unusable ones."""

from __future__ import annotations

from typing import Protocol

BLOCK_BYTES = 4 << 20
"""Size of a block with its own checksum; the last block may be smaller."""


class HeldWeightsError(Exception):
    """Held memory has wrong content. The message is one line."""


class HeldBlocks(Protocol):
    """The blocks of finished memory, and their checksums."""

    @property
    def fd(self) -> int:
        """The first fd in the mailbox, which identifies the content."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def check(self, block: int) -> None:
        """Any thread may call it. Raises HeldWeightsError if the block has changed."""
        ...

    def close(self) -> None: ...


def num_blocks(data_bytes: int) -> int:
    return -(-data_bytes // BLOCK_BYTES)


def block_place(data_bytes: int, block: int) -> tuple[int, int]:
    """Return where a block begins, and its size."""
    begin = block * BLOCK_BYTES
    return begin, min(BLOCK_BYTES, data_bytes - begin)


def changed(begin: int, num_bytes: int) -> HeldWeightsError:
    return HeldWeightsError(f"bytes {begin} to {begin + num_bytes} have changed")
