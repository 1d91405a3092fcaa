"""The tokenizers library, of which a damaged tokenizer.json or an unlucky text is an error instead of a panic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
from tokenizers import Tokenizer, processors

from penstock.process.native.panics import guarded

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Encoding


class GuardedTokenizer:
    """A tokenizer. Each method is the library's of that name, and raises LibraryError where that panics."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.no_truncation = guarded(tokenizer.no_truncation)
        self.no_padding = guarded(tokenizer.no_padding)
        self.encode_batch = guarded(tokenizer.encode_batch)
        self.encode_batch_fast = guarded(tokenizer.encode_batch_fast)
        self.post_process = guarded(tokenizer.post_process)
        self.num_special_tokens_to_add = guarded(tokenizer.num_special_tokens_to_add)
        self.decode = guarded(tokenizer.decode)
        self.decode_batch = guarded(tokenizer.decode_batch)
        self.get_vocab = guarded(tokenizer.get_vocab)
        self.get_added_tokens_decoder = guarded(tokenizer.get_added_tokens_decoder)
        self.id_to_token = guarded(tokenizer.id_to_token)
        self.token_to_id = guarded(tokenizer.token_to_id)
        self.decoder_types: frozenset[str] = guarded(_decoder_types)(tokenizer)

    @classmethod
    def from_file(cls, path: Path) -> GuardedTokenizer:
        """Raises LibraryError for what the library cannot read."""
        return cls(guarded(Tokenizer.from_file)(str(path)))


def _decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the types of a tokenizer's decoder, and of its parts if it is a sequence."""
    if tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = msgspec.json.decode(tokenizer.decoder.__getstate__())
    return frozenset(part["type"] for part in (state, *state.get("decoders", ())))


def check_readable(tokenizer_json: bytes) -> None:
    """Raises LibraryError for what the library cannot read."""
    guarded(Tokenizer.from_buffer)(tokenizer_json)


def truncate(encoding: Encoding, num_tokens: int, side: Literal["left", "right"]) -> None:
    guarded(encoding.truncate)(num_tokens, direction=side)


def begin_texts_with(tokenizer: Tokenizer, token: str) -> None:
    """Put the token before each text, if the vocabulary has it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, token_id)]
        )
