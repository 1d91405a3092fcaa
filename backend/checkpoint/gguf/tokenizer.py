"""Makes tokenizer.json, tokenizer_config.json and the end tokens from a GGUF file's metadata.

Two kinds exist: "llama" is SentencePiece with scores instead of merges; "gpt2" is byte-level BPE, whose way to split
text is only named. A name that is not listed here is refused, because another split gives other tokens.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.gguf.splits import SPLITS
from penstock.backend.checkpoint.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"
_MAX_PIECE_CHARACTERS = 128
"""No SentencePiece vocabulary has longer pieces of text; longer ones are never merged."""


class _Kind(IntEnum):
    """Values of token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class GgufTokenizer:
    """The tokenizer's metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Raises StartupError if the file has no tokenizer, or one of another kind."""
        self._metadata = metadata
        self.tokens = self._list("tokens", str)
        if not self.tokens:
            raise StartupError(f"{_PREFIX}tokens is missing: the file has no tokenizer")
        kinds = self._list("token_type", int)
        self._kinds = kinds or [_Kind.NORMAL] * len(self.tokens)
        if len(self._kinds) != len(self.tokens):
            raise StartupError(f"{_PREFIX}token_type has {len(kinds)} items for {len(self.tokens)} tokens")
        self._vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(self._vocab) < len(self.tokens):
            index = next(index for index, token in enumerate(self.tokens) if self._vocab[token] != index)
            twin = self._vocab[self.tokens[index]]
            raise StartupError(f"{_PREFIX}tokens has {shorten(self.tokens[index])} twice, as {index} and {twin}")

    def tokenizer_json(self) -> dict[str, Any]:
        """Raises StartupError."""
        model = self._get("model", str)
        if model == "llama":
            pipeline = self._sentencepiece()
        elif model == "gpt2":
            pipeline = self._byte_level()
        else:
            raise StartupError(f"{_PREFIX}model is {shorten(model)}; supported are llama and gpt2")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            **pipeline,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        config: dict[str, Any] = {
            name: self.tokens[token_id]
            for name, key in names.items()
            if (token_id := self._token_id(f"{key}_token_id")) is not None
        }
        template = self._metadata.get("tokenizer.chat_template")
        return config | ({"chat_template": template} if isinstance(template, str) else {})

    def end_tokens(self) -> list[int]:
        """The tokens that end texts and turns."""
        found = [self._token_id(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        return list(dict.fromkeys(token_id for token_id in found if token_id is not None))

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for index, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=True)):
            if kind in (_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN) and token:
                yield {"id": index, "content": token, **flags, "special": kind != _Kind.USER_DEFINED}

    def _sentencepiece(self) -> dict[str, Any]:
        adds_space = self._get("add_space_prefix", bool)
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space is not False else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else []
        unknown = self._token_id("unknown_token_id")
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, spaces]},
            "pre_tokenizer": None,
            "post_processor": self._template(adds_bos=True),
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    *strip,
                ],
            },
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._vocab,
                "merges": self._merges() or self._merges_of_scores(),
            },
        }

    def _byte_level(self) -> dict[str, Any]:
        name = self._get("pre", str)
        if name not in SPLITS:
            raise StartupError(f"{_PREFIX}pre is {shorten(name)}; supported are {', '.join(SPLITS)}")
        split = SPLITS[name]
        steps = [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
            for expression in split.expressions
        ]
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
        return {
            "normalizer": {"type": "NFC"} if split.composes else None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*steps, bytes_ | {"use_regex": False}],
            },
            "post_processor": self._template(adds_bos=split.adds_bos),
            "decoder": bytes_ | {"use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": self._vocab,
                "merges": self._merges(),
                "ignore_merges": split.whole_words,
            },
        }

    def _template(self, *, adds_bos: bool) -> dict[str, Any] | None:
        """The post-processor that adds bos; None if nothing is added.

        adds_bos applies if the metadata do not decide.
        """
        said = self._get("add_bos_token", bool)
        bos = self._token_id("bos_token_id")
        if bos is None or not (adds_bos if said is None else said):
            return None
        token = self.tokens[bos]
        one, two = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
        first = {"SpecialToken": {"id": token, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [first, one],
            "pair": [first, one, two],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }

    def _merges(self) -> list[list[str]]:
        merges = [merge.split(" ") for merge in self._list("merges", str)]
        for pair in merges:
            if len(pair) != 2 or pair[0] not in self._vocab or pair[1] not in self._vocab:
                raise StartupError(f"{_PREFIX}merges has {shorten(' '.join(pair))}, which is no pair of tokens")
            if "".join(pair) not in self._vocab:
                raise StartupError(f"{_PREFIX}merges has {shorten(' '.join(pair))}, which gives no token")
        return merges

    def _merges_of_scores(self) -> list[list[str]]:
        """Every way to build a token from two others, the token with the highest score first."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise StartupError(f"{_PREFIX}scores has {len(scores)} items for {len(self.tokens)} tokens")
        found = []
        for index, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=True)):
            if kind == _Kind.NORMAL and len(token) <= _MAX_PIECE_CHARACTERS:
                pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
                found += [(-scores[index], index, a, b) for a, b in pairs if a in self._vocab and b in self._vocab]
        return [[a, b] for _, _, a, b in sorted(found)]

    def _token_id(self, key: str) -> int | None:
        value: int | None = self._get(key, int)
        if value is not None and not 0 <= value < len(self.tokens):
            raise StartupError(f"{_PREFIX}{key} is {value}; the file has {len(self.tokens)} tokens")
        return value

    def _get(self, key: str, kind: type[Any]) -> Any:
        value = self._metadata.get(_PREFIX + key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise StartupError(f"{_PREFIX}{key} is {shorten(value)}; expected {kind.__name__}")
        return value

    def _list(self, key: str, kind: type[Any]) -> list[Any]:
        values = self._get(key, list) or []
        if any(type(value) is not kind for value in values):
            raise StartupError(f"{_PREFIX}{key} is not a list of {kind.__name__}")
        return list(values)


def check_tokenizer(tokenizer_json: dict[str, Any]) -> str:
    """Return the text if the tokenizers library accepts it. Raises StartupError."""
    from tokenizers import Tokenizer  # not needed by a model whose files are already there

    text = json.dumps(tokenizer_json, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise StartupError(f"the file's tokenizer cannot be used: {shorten(str(error))}") from None
    return text
