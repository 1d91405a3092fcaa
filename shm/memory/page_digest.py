"""Names of the full pages in a backend's KV cache that can be found now: a table behind its board.

One process writes it, any process reads it. It is a hint: a name overwrites another one of the same word, and a page
may be evicted while a reader looks. A wrong hint costs recomputation, never a wrong answer.

A name is 63 bits of a chain of hashes over the tokens of a page and all before it, which begins with the tenant's salt.
Backends of one model have the same names for the same tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Self

_HEADER = struct.Struct("=QQQ")  # magic, tokens of a page, words
_MAGIC = 0x50_4E_53_54_44_49_47_31
_HEADER_BYTES = 64
_NAME_BYTES = 8
_WORDS_PER_PAGE = 2
_MAX_WORDS = 1 << 18
_MAX_PAGES = 256
"""Named pages of a prompt, at most: each costs about a microsecond."""


class PageDigest:
    """The table of one backend, for readers."""

    def __init__(self, page_size_tokens: int, words: memoryview) -> None:
        """The number of words is a power of 2."""
        self.page_size_tokens = page_size_tokens
        self._words = words
        self._mask = len(words) - 1

    @classmethod
    def read(cls, memory: memoryview) -> Self | None:
        """Return the table; None if this memory has none, as behind the board of a model without pages."""
        if len(memory) < _HEADER_BYTES:
            return None
        magic, page_size_tokens, num_words = _HEADER.unpack_from(memory)
        is_possible = page_size_tokens > 0 and 0 < num_words <= _MAX_WORDS and num_words & (num_words - 1) == 0
        if magic != _MAGIC or not is_possible or len(memory) < _HEADER_BYTES + 8 * num_words:
            return None
        return cls(page_size_tokens, memory[_HEADER_BYTES : _HEADER_BYTES + 8 * num_words].cast("Q"))

    def num_cached_tokens(self, names: Sequence[int]) -> int:
        """The number of tokens up to the prompt's last page that can be found. names come from `page_names`.

        Earlier pages are not looked up: their word may have been overwritten, and they are evicted last.
        """
        for index in range(len(names) - 1, -1, -1):
            if self._words[names[index] & self._mask] == names[index]:
                return (index + 1) * self.page_size_tokens
        return 0

    def close(self) -> None:
        self._words.release()


class PageDigestWriter:
    """Keeps the table as pages become findable and are evicted: a `FullPageObserver`."""

    def __init__(self, memory: memoryview, page_size_tokens: int) -> None:
        """memory has `digest_bytes`, all zero."""
        num_words = (len(memory) - _HEADER_BYTES) // 8
        _HEADER.pack_into(memory, 0, _MAGIC, page_size_tokens, num_words)
        self._words = memory[_HEADER_BYTES:].cast("Q")
        self._mask = num_words - 1
        self._names: dict[bytes, int] = {}
        """By page hash."""

    def note_stored(self, page_hash: bytes, parent_hash: bytes, salt: bytes, content: bytes) -> None:
        """Add a page. One whose parent is gone gets no name: nobody finds it from the beginning of a prompt."""
        if parent_hash == salt:
            parent = _first(salt)
        elif (number := self._names.get(parent_hash)) is not None:
            parent = number.to_bytes(_NAME_BYTES, "little")
        else:
            return
        name = self._names[page_hash] = _name(parent, content)
        self._words[name & self._mask] = name

    def note_removed(self, page_hash: bytes) -> None:
        name = self._names.pop(page_hash, None)
        if name is not None and self._words[name & self._mask] == name:
            self._words[name & self._mask] = 0

    def close(self) -> None:
        self._words.release()


def digest_bytes(num_pages: int) -> int:
    """Size of a table for this many pages, at most 2 MiB; 0 without pages."""
    if not num_pages:
        return 0
    return _HEADER_BYTES + 8 * min(_MAX_WORDS, 1 << (_WORDS_PER_PAGE * num_pages - 1).bit_length())


def page_names(tokens: array[int], salt: bytes, page_size_tokens: int) -> list[int]:
    """The names of the prompt's beginnings in full pages, shortest first, for at most 256 pages.

    The last token is left out: it is always computed.
    """
    parent, names = _first(salt), []
    for end in range(page_size_tokens, min(len(tokens) - 1, _MAX_PAGES * page_size_tokens) + 1, page_size_tokens):
        name = _name(parent, tokens[end - page_size_tokens : end].tobytes())
        parent = name.to_bytes(_NAME_BYTES, "little")
        names.append(name)
    return names


def _first(salt: bytes) -> bytes:
    return salt.ljust(16, b"\0") + bytes([len(salt)])


def _name(parent: bytes, content: bytes) -> int:
    """A page's name; never 0, which marks an empty word."""
    digest = blake2b(content, digest_size=_NAME_BYTES, key=parent).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 63
