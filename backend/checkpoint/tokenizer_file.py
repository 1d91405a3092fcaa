"""tokenizer.json of a Hugging Face checkpoint, read only for its token ids. Frontends and grammars use all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from penstock.backend.checkpoint.json_file import convert, read_json_object
from penstock.backend.checkpoint.layout import TOKENIZER_FILE

if TYPE_CHECKING:
    from pathlib import Path


class _AddedToken(Struct, frozen=True):
    id: int


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
    tokenizer = convert(read_json_object(path), _Tokenizer, path)
    vocab = tokenizer.model.vocab
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return TokenIdCounts(highest + 1, max([highest, *(token.id for token in tokenizer.added_tokens)]) + 1)
