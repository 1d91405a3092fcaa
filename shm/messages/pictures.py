"""Pictures of a prompt: where their embeddings go, the pixels that they are computed from, and the ids that stand for
them among the prompt's tokens."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Annotated

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import I31, MAX_CONTEXT_TOKENS, MAX_PICTURE_SPANS, U63

_DIGEST_BYTES = 32


class ArenaRef(Struct, frozen=True, array_like=True, tag=20, forbid_unknown_fields=True):
    """A claim about bytes in the sender's arena. `ArenaReader.read` copies and checks them first."""

    slot: Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
    sequence: U63
    num_bytes: Annotated[int, Meta(ge=4, le=4 * MAX_CONTEXT_TOKENS)]


_Size = Annotated[int, Meta(ge=1, le=1 << 26)]


class Picture(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture whose embeddings take the place of some of the prompt's tokens.

    The tokens of its spans are the `picture_token_ids` of its digest, in order through all spans.
    """

    spans: Annotated[
        tuple[tuple[I31, Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]], ...],
        Meta(min_length=1, max_length=MAX_PICTURE_SPANS),
    ]
    """(first token, number of tokens), ascending."""
    digest: Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
    """The `picture_digest`. A tenant's pictures of one digest share embeddings and pages."""
    shape: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=5)]
    """Of the pixels: what the model's image processor returns for one picture without rescaling and normalising, such
    as [tiles, 3, height, width], or [patches, values] of patches that the processor flattens."""
    grid: tuple[_Size, _Size, _Size]
    """What the processor returns beside the pixels: (frames, rows, columns) of patches, or (1, height, width) of the
    picture before it was cut into tiles; (1, 1, 1) for nothing."""
    pixels: ArenaRef | None = None
    """uint8, in C order, until the request ends. None in a question about a request, which computes nothing."""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.spans)


def picture_digest(shape: tuple[int, ...], grid: tuple[int, int, int], pixels: bytes | memoryview) -> bytes:
    """SHA-256 over shape, grid and pixels."""
    digest = hashlib.sha256(struct.pack(f"<{len(shape) + 4}Q", len(shape), *shape, *grid))
    digest.update(pixels)
    return digest.digest()


def picture_token_ids(digest: bytes, count: int) -> array[int]:
    """The ids (int32) of a picture's tokens: negative, and never -1.

    They are 30 bits each of SHAKE-128 of the digest. So everything that finds tokens again by their ids, such as the
    prefix cache, finds pictures again by their content, and takes none for another.
    """
    bits = int.from_bytes(hashlib.shake_128(digest).digest(4 * count), "little")
    sign_bits = int.from_bytes(b"\x00\x00\x00\x80" * count, "little")
    low_bits = int.from_bytes(b"\x01\x00\x00\x00" * count, "little")
    return array("i", ((bits | sign_bits | low_bits) ^ low_bits).to_bytes(4 * count, "little"))
