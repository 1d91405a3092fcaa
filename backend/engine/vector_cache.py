"""Keeps finished vectors, so that an equal input that comes later is not computed again."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backend.engine.vectors import Vectors
    from penstock.shm.messages import Pooled

_ENTRY_BYTES = 512
"""Memory of an entry in addition to its values: objects and the key, rounded up."""
_KEY_BYTES = 32


class VectorCache:
    """At most max_bytes of vectors; the least recently used one goes first. Different salts share nothing.

    Entries are found by a hash with a secret key, so nobody can make two inputs that have the same one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._entries: OrderedDict[bytes, Vectors] = OrderedDict()
        self.num_bytes = 0

    def key(self, salt: bytes, pooled: Pooled, tokens: bytes) -> bytes:
        """Return a hash of everything that an input's vector depends on. tokens are packed int32."""
        head = f"{pooled.kind} {pooled.second_start} {len(salt)} ".encode()
        return hashlib.blake2b(b"".join((head, salt, tokens)), digest_size=_KEY_BYTES, key=self._secret).digest()

    def get(self, key: bytes) -> Vectors | None:
        if (vectors := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return vectors

    def put(self, key: bytes, vectors: Vectors) -> None:
        """Keep a copy if it fits."""
        num_bytes = _size(vectors)
        if num_bytes > self._max_bytes:
            return
        if (old := self._entries.pop(key, None)) is not None:
            self.num_bytes -= _size(old)
        self._entries[key] = vectors.copy()
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= _size(oldest)


def _size(vectors: Vectors) -> int:
    return vectors.num_bytes + _ENTRY_BYTES
