"""The ids of tokens, and the tokens that a Hugging Face checkpoint names, such as its end of text.

Frontends and grammars use all of tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct

from penstock.backend.checkpoint.files.json_file import convert, decode_json_object, read_bytes, read_fields
from penstock.backend.checkpoint.files.layout import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE


class _AddedToken(Struct, frozen=True):
    id: int
    content: str = ""


class _AddedTokens(Struct, frozen=True):
    added_tokens: tuple[_AddedToken, ...] = ()


class _NamedTokens(Struct, frozen=True):
    eos_token: Any = UNSET


class _Model(Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}
    """Token → id; for a Unigram model a list of (token, score), indexed by id."""


class _Tokenizer(Struct, frozen=True):
    model: _Model = _Model()
    added_tokens: tuple[_AddedToken, ...] = ()


class TokenIdCounts(NamedTuple):
    """Highest token id + 1: in the tokenizer's own vocabulary, and including tokens that were added later."""

    own: int
    with_added: int


def count_token_ids(model_dir: Path) -> TokenIdCounts | None:
    """None when the directory has no tokenizer.json. Raises StartupError."""
    path = model_dir / TOKENIZER_FILE
    if not path.is_file():
        return None
    content = read_bytes(path)
    try:
        tokenizer = msgspec.json.decode(content, type=_Tokenizer)  # merges and the like are not made
    except (ValueError, RecursionError):
        tokenizer = convert(decode_json_object(content, path), _Tokenizer, path)  # names what is wrong
    vocab = tokenizer.model.vocab
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return TokenIdCounts(highest + 1, max([highest, *(token.id for token in tokenizer.added_tokens)]) + 1)


def read_token_ids(model_dir: Path) -> dict[str, int]:
    """The ids of all tokens by text; without a tokenizer.json empty. Raises StartupError."""
    path = model_dir / TOKENIZER_FILE
    if not path.is_file():
        return {}
    tokenizer = read_fields(path, _Tokenizer)
    vocab = tokenizer.model.vocab
    own = vocab if isinstance(vocab, dict) else {str(entry[0]): token for token, entry in enumerate(vocab)}
    return own | {token.content: token.id for token in tokenizer.added_tokens}


def added_token_ids(model_dir: Path) -> dict[str, int]:
    """The ids of tokens that are not built from others, special or not, by text; without a tokenizer.json empty.

    Raises StartupError.
    """
    path = model_dir / TOKENIZER_FILE
    return {token.content: token.id for token in read_fields(path, _AddedTokens).added_tokens} if path.is_file() else {}


def end_of_text(model_dir: Path, added: Mapping[str, int]) -> int | None:
    """The id of the end token that the tokenizer's own files name, if they do. added are its `added_token_ids`.

    Raises StartupError.
    """
    named: object = UNSET
    for path in (model_dir / TOKENIZER_CONFIG_FILE, model_dir / SPECIAL_TOKENS_FILE):
        if named is UNSET and path.is_file():
            named = read_fields(path, _NamedTokens).eos_token
    text = named.get("content") if isinstance(named, dict) else named
    path = model_dir / TOKENIZER_FILE
    if not isinstance(text, str) or text in added or not path.is_file():
        return added.get(text) if isinstance(text, str) else None
    vocab = read_fields(path, _Tokenizer).model.vocab
    return vocab.get(text) if isinstance(vocab, dict) else None
