"""Remembers which replica has received which beginning of a prompt: a fixed number of words, which workers share.

It is a hint. A replica may have evicted the pages, and another prefix may have overwritten an entry. A wrong hint costs
recomputation, never a wrong answer.
"""

from __future__ import annotations

import mmap
from array import array
from hashlib import blake2b
from typing import NamedTuple, Self

from penstock.shm.memory import region

_NUM_WORDS = 1 << 16
_NUM_BYTES = 8 * _NUM_WORDS
_KEY_BYTES = 32
_SHORT_CHUNK, _SHORT_TOKENS = 64, 1024
_LONG_CHUNK, _MAX_TOKENS = 512, 32_768
"""A prompt has a name at each multiple of 64 tokens up to 1024, then of 512: 78 names at most."""
_OWNER_BITS = 0xFFFF
MAX_REPLICAS = 255


class Owner(NamedTuple):
    """The replica that received a prefix. generation most likely differs in the replica's next life: then its pages are
    gone."""

    replica: int
    generation: int


class PrefixTable:
    """Each word holds 48 bits of a name, and its owner. Workers write single words, so they need no lock."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._words = memoryview(mapping)[:_NUM_BYTES].cast("Q")
        self._key = bytes(mapping[_NUM_BYTES : _NUM_BYTES + _KEY_BYTES])
        """Names cannot be foretold by clients, who choose the tokens."""

    @classmethod
    def create_fd(cls, key: bytes) -> int:
        """Return the fd of a new table, which the caller owns. key is 32 random bytes. Raises OSError."""
        fd = region.create("penstock-prefixes", _NUM_BYTES + _KEY_BYTES)
        with mmap.mmap(fd, _NUM_BYTES + _KEY_BYTES) as mapping:
            mapping[_NUM_BYTES:] = key
        region.seal(fd)
        return fd

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The fd stays the caller's. Raises RegionError."""
        return cls(region.attach(fd, _NUM_BYTES + _KEY_BYTES, writable=True))

    @classmethod
    def private(cls, key: bytes) -> Self:
        """A table that no other process sees."""
        mapping = mmap.mmap(-1, _NUM_BYTES + _KEY_BYTES)
        mapping[_NUM_BYTES:] = key
        return cls(mapping)

    def names(self, tokens: array[int], salt: bytes) -> list[int]:
        """The names of the prompt's beginnings, shortest first. Tenants with different salts share none."""
        name = blake2b(salt, digest_size=8, key=self._key).digest()
        names = []
        start = 0
        while start < _MAX_TOKENS:
            end = start + (_SHORT_CHUNK if start < _SHORT_TOKENS else _LONG_CHUNK)
            if end > len(tokens):
                break
            name = blake2b(name + tokens[start:end].tobytes(), digest_size=8, key=self._key).digest()
            names.append(int.from_bytes(name, "little"))
            start = end
        return names

    def name_of(self, tokens: array[int], salt: bytes, settings: bytes) -> int:
        """The name of a whole request: equal requests have the same name."""
        digest = blake2b(salt.ljust(16, b"\0"), digest_size=8, key=self._key)
        digest.update(len(settings).to_bytes(8, "little"))
        digest.update(settings)
        digest.update(tokens.tobytes())
        return int.from_bytes(digest.digest(), "little")

    def find(self, name: int) -> Owner | None:
        word = self._words[name & _OWNER_BITS]
        if word >> 16 != name >> 16 or not word & 0xFF:
            return None
        return Owner((word & 0xFF) - 1, word >> 8 & 0xFF)

    def note(self, name: int, owner: Owner) -> None:
        self._words[name & _OWNER_BITS] = (name & ~_OWNER_BITS) | owner.generation << 8 | (owner.replica + 1)
