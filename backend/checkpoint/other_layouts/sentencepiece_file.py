"""SentencePiece models (tokenizer.model), BPE and Unigram."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.backend.checkpoint.gguf.tokenizer import GgufTokenizer
from penstock.backend.checkpoint.other_layouts.added_tokens import AddedTokens, metadata_of, token_text
from penstock.backend.errors import StartupError

_UNIGRAM, _BPE = 1, 2
_NORMAL, _USER_DEFINED, _SYMBOL = 1, 4, 7
"""Types of pieces, and one of our own: a user-defined symbol that no added token replaces."""
_SPACE = "\u2581"
_NAME_OF_BYTE = r"(?<=<)0x[0-9A-F]{2}>"
"""The end of a text like <0x41>: apart from its beginning, so that it is not taken for the byte."""
_NEVER = 100.0
"""A piece this far below all others is never the best way to write a text."""


def convert_sentencepiece(
    path: Path, config: Mapping[str, Any], added: AddedTokens
) -> tuple[dict[str, Any], dict[str, str]]:
    """The tokenizer.json, and the model's own bos_token, eos_token and unk_token.

    Raises StartupError, and the library's DecodeError for another kind of file.
    """
    model = _read(path)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE) or trainer.treat_whitespace_as_suffix or not model.pieces:
        raise StartupError("it is no SentencePiece model of the kinds BPE and Unigram with spaces before words")
    tokens, kinds = [piece.piece for piece in model.pieces], [piece.type for piece in model.pieces]
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    own = {name: tokens[index] for name, index in ids.items() if 0 <= index < len(tokens)}
    settings = {"add_bos_token": True, **own, **config}
    metadata = metadata_of(tokens, kinds, settings, added)
    # An added token ends a part of the text, and a space may precede the next. A symbol of the text itself does not.
    symbols = [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED and i not in added.by_id]
    for index in symbols:
        kinds[index] = _SYMBOL
    scores = [piece.score for piece in model.pieces] + [0.0] * (len(tokens) - len(model.pieces))
    adds_space = settings.get("add_prefix_space", normalizer.add_dummy_prefix) is not False
    only_first = adds_space and settings.get("legacy") is False
    metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": adds_space and not only_first,
    }
    if (unknown := token_text(settings, "unk_token")) in tokens:
        metadata["tokenizer.ggml.unknown_token_id"] = tokens.index(unknown)
    tokenizer = GgufTokenizer(metadata).tokenizer_json(adds_end=True)
    tokenizer["normalizer"]["normalizers"][:0] = _normalizers(normalizer)
    patterns = [re.escape(token) for token in sorted((tokens[index] for index in symbols), key=len, reverse=True)]
    if trainer.byte_fallback and (symbols or trainer.model_type == _UNIGRAM):
        patterns.append(_NAME_OF_BYTE)
    if pre_tokenizers := [*_pre_tokenizers("|".join(patterns), only_first=only_first)]:
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers}
    if only_first:
        tokenizer["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if trainer.model_type == _UNIGRAM:
        unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
        tokenizer["model"] = {"type": "Unigram", "unk_id": unknown_id, "vocab": _unigram(tokens, kinds, scores)}
    else:
        tokenizer["model"]["ignore_merges"] = bool(symbols)
    tokenizer["model"]["byte_fallback"] = trainer.byte_fallback
    return tokenizer, own


def read_normalizer(path: Path) -> list[dict[str, Any]]:
    """The normalizers of a tokenizer.json that do what the file says. Raises the library's DecodeError."""
    return [*_normalizers(_read(path).normalizer_spec)]


def _read(path: Path) -> Any:
    model: Any = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()  # made at run time by protobuf
    model.ParseFromString(path.read_bytes())
    return model


def _unigram(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, float]]:
    """SentencePiece finds only pieces of these kinds in a text; tokenizers finds all."""
    least = min(scores) - _NEVER
    return [
        (token, score if kind in (_NORMAL, _SYMBOL) else least)
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
    ]


def _pre_tokenizers(pattern: str, *, only_first: bool) -> Iterator[dict[str, Any]]:
    if only_first:
        yield {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    if pattern:
        yield {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _normalizers(spec: Any) -> Iterator[dict[str, Any]]:
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": charsmap}
    if spec.remove_extra_whitespaces:
        for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
            yield {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
