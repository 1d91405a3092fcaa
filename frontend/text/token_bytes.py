"""The bytes of single tokens, which may be parts of characters; a decoder gives only the text of whole runs."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
_NUM_KEPT = 1 << 16


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, printable bytes standing for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenBytes:
    """Of one tokenizer, whose decoder tells how its tokens spell bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._is_byte_level = "ByteLevel" in _decoder_kinds(tokenizer)

        self.text_and_bytes = lru_cache(_NUM_KEPT)(self._spelled)
        """The token's text, as far as it is one, and its bytes. Answers with log probabilities ask for many."""

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that no token has: models are often padded with such."""
        return self.text_and_bytes(token_id)[1]

    def _spelled(self, token_id: int) -> tuple[str, bytes]:
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


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The types of a tokenizer's decoders, those of a sequence among them."""
    if tokenizer.decoder is None:
        return set()
    state: dict[str, Any] = msgspec.json.decode(tokenizer.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}
