"""The bytes of single tokens. They may be parts of characters; a decoder returns only the text of several tokens.

And which tokens spell a text within a longer one.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from penstock.process.native_libraries import GuardedTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
_CACHE_SIZE = 1 << 16
_BETWEEN = b"\xff"
"""Stands between tokens; no UTF-8 text contains it."""
_MAX_TAIL_TOKENS = 20
"""llama.cpp's."""


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable character for each byte; a printable byte is its own character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenBytes:
    """The bytes of one tokenizer's tokens. The tokenizer's decoder determines how tokens spell bytes."""

    def __init__(self, tokenizer: GuardedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._is_byte_level = "ByteLevel" in tokenizer.decoder_types

        self.text_and_bytes = lru_cache(_CACHE_SIZE)(self._text_and_bytes)
        """Returns a token's text, with U+FFFD for parts of characters, and its bytes. Cached: log probabilities need
        many."""

    def __call__(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for an id without a token. Vocabularies are often padded with such ids."""
        return self.text_and_bytes(token_id)[1]

    def all(self, num_tokens: int) -> list[bytes]:
        """Return the bytes of the tokens below num_tokens, without a place in the cache."""
        return [self._bytes(token_id) for token_id in range(num_tokens)]

    def _text_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        raw = self._bytes(token_id)
        return raw.decode(errors="replace"), raw

    def _bytes(self, token_id: int) -> bytes:
        content: str | None = self._added.get(token_id)
        if content is not None:
            return content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(bytes((_BYTES[c],)) if c in _BYTES else c.encode() for c in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes((int(byte[1], 16),))
        return token.replace(_SPACE_MARK, " ").encode()


class BreakerSearch:
    """Finds DRY's sequence breakers as llama.cpp does. All tokens' bytes are in one, so a search takes milliseconds."""

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[list[str]], list[list[int]]]) -> None:
        """tokens by id. encode adds no special tokens."""
        self._encode = encode
        self._text = _BETWEEN.join([b"", *tokens, b""])
        self._starts = list(accumulate((len(token) + 1 for token in tokens), initial=1))

    def find(self, texts: Sequence[str], max_bytes: int) -> bytes:
        """Return int32 ids, each run followed by -1. Stops when they take more than max_bytes.

        A run is a token that contains a text, or one that ends with the text's beginning and the tokens of its rest.
        """
        flat = array("i")
        for run in self._runs(texts):
            flat.extend((*run, -1))
            if len(flat) * flat.itemsize > max_bytes:
                break
        return flat.tobytes()

    def _runs(self, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
        for text in texts:
            whole = self._containing(text.encode())
            yield from ((token,) for token in sorted(whole))
            tails = self._encode([text[end:] for end in range(1, len(text))])
            for end, tail in enumerate(tails, 1):
                heads = self._containing(text[:end].encode() + _BETWEEN) - whole
                yield from ((token, *tail[:_MAX_TAIL_TOKENS]) for token in sorted(heads))

    def _containing(self, piece: bytes) -> set[int]:
        """The tokens in which the piece begins."""
        places, place = [], self._text.find(piece)
        while place >= 0:
            places.append(place)
            place = self._text.find(piece, place + 1)
        return {bisect_right(self._starts, place) - 1 for place in places}
