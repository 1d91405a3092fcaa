"""Makes tokenizer.json, tokenizer_config.json and the end tokens from a GGUF file's metadata.

Five kinds exist: "llama" is SentencePiece's BPE with scores instead of merges, "gemma4" the same with merges; "gpt2" is
byte-level BPE, whose way to split text is only named (`splits.py`); "bert" is WordPiece, "t5" SentencePiece's Unigram.
Others are refused.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import msgspec

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.gguf.splits import SPLITS
from penstock.backend.errors import StartupError

_PREFIX = "tokenizer.ggml."
_NAMED_TEMPLATE = "tokenizer.chat_template."
_SPACE = "\u2581"
_FILL_IN = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}
"""Keys of the tokens for filling in code: today's, and the older ones."""
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
        # A token without text cannot be found in a text; of a token that occurs twice the last one is used.
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(self.tokens)]
        if self._get("model", str) == "bert":
            self.tokens = [_with_hashes(token, kind) for token, kind in zip(self.tokens, self._kinds, strict=True)]
        self._vocab = {token: index for index, token in enumerate(self.tokens)}

    def tokenizer_json(self, *, adds_end: bool = False) -> dict[str, Any]:
        """adds_end: texts end with eos or the separator, if the metadata say so. Raises StartupError."""
        self._adds_end = adds_end
        pipelines = {
            "llama": self._sentencepiece,
            "gemma4": self._sentencepiece,
            "gpt2": self._byte_level,
            "bert": self._word_piece,
            "t5": self._unigram,
        }
        model = self._get("model", str)
        if model not in pipelines:
            raise StartupError(f"{_PREFIX}model is {shorten(model)}; supported are {', '.join(pipelines)}")
        pipeline = pipelines[model]()
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
        fill_in = {name: token_id for name in _FILL_IN if (token_id := self._fill_in_id(name)) is not None}
        return config | ({"fim_token_ids": fill_in} if fill_in else {}) | self._templates()

    def _fill_in_id(self, name: str) -> int | None:
        """Return the id under the first of the keys that the file has."""
        found = (self._token_id(f"{key}_token_id") for key in _FILL_IN[name])
        return next((token_id for token_id in found if token_id is not None), None)

    def _templates(self) -> dict[str, Any]:
        """The chat template; with others by name, such as tool_use, a list as in Hugging Face checkpoints."""
        named = {
            key.removeprefix(_NAMED_TEMPLATE): value
            for key, value in self._metadata.items()
            if key.startswith(_NAMED_TEMPLATE) and isinstance(value, str)
        }
        default = self._metadata.get("tokenizer.chat_template")
        if isinstance(default, str):
            named = {"default": default, **named}
        if named.keys() <= {"default"}:
            return {"chat_template": named["default"]} if named else {}
        return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}

    def end_tokens(self) -> list[int]:
        """The tokens that end texts and turns."""
        found = [self._token_id(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        return list(dict.fromkeys(token_id for token_id in found if token_id is not None))

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for index, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=True)):
            if kind in (_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN) and self._vocab[token] == index:
                yield {"id": index, "content": token, **flags, "special": kind != _Kind.USER_DEFINED}

    def _sentencepiece(self) -> dict[str, Any]:
        adds_space = False if self._get("model", str) == "gemma4" else self._get("add_space_prefix", bool)
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
            raise StartupError(f"{_PREFIX}pre is {shorten(name)}; it is none of {len(SPLITS)} known ways to split text")
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
            "post_processor": self._template(
                adds_bos=split.adds_bos, separator=split.separator, doubles_separator=split.separator is not None
            ),
            "decoder": bytes_ | {"use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": self._vocab,
                "merges": self._merges(),
                "ignore_merges": split.whole_words,
            },
        }

    def _word_piece(self) -> dict[str, Any]:
        """BERT's tokenizer."""
        lowercase = self._get("normalizer.lowercase", bool)
        if lowercase is None:
            lowercase = not any("A" <= token[0] <= "Z" for token in self.tokens)
        return {
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": self._get("normalizer.strip_accents", bool),
                "lowercase": lowercase,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": self._template(adds_bos=True, separator="[SEP]"),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": self._special("unknown", "[UNK]"),
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": self._vocab,
            },
        }

    def _unigram(self) -> dict[str, Any]:
        """XLM-RoBERTa's tokenizer: SentencePiece that chooses the pieces with the highest sum of scores."""
        scores, chars = self._scores(), self._list("precompiled_charsmap", int)
        if not all(0 <= char < 256 for char in chars):
            raise StartupError(f"{_PREFIX}precompiled_charsmap is not a list of bytes")
        chars_map = base64.b64encode(bytes(chars)).decode()
        scheme = "never" if self._get("add_space_prefix", bool) is False else "always"
        spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": True}
        return {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": chars_map} if chars else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
            "post_processor": self._template(adds_bos=True, doubles_separator=True),
            "decoder": spaces,
            "model": {
                "type": "Unigram",
                "vocab": list(zip(self.tokens, scores, strict=True)),
                "unk_id": self._token_id("unknown_token_id"),
                "byte_fallback": False,
            },
        }

    def _special(self, key: str, usual: str) -> str:
        """A token by its key, else by its usual text. Raises StartupError if there is neither."""
        token_id = self._token_id(f"{key}_token_id")
        if token_id is None and usual not in self._vocab:
            raise StartupError(f"{_PREFIX}{key}_token_id is missing, and there is no token {usual}")
        return usual if token_id is None else self.tokens[token_id]

    def _template(
        self, *, adds_bos: bool, separator: str | None = None, doubles_separator: bool = False
    ) -> dict[str, Any] | None:
        """The post-processor that adds bos, and at the end eos or the separator; None if nothing is added.

        adds_bos, separator, the usual text of that token, and doubles_separator, whether two tokens are between two
        texts, apply if the metadata do not decide.
        """
        is_bert = self._get("model", str) == "bert"
        first = self._added("add_bos_token", "bos", default=adds_bos)
        if is_bert and first is None:
            first = self._special("cls", "[CLS]")
        last = None
        if self._adds_end:
            last = self._added("add_eos_token", "eos") or self._added("add_sep_token", "seperator")
            if last is None and separator is not None:
                last = self._special("seperator", separator)
        if first is None and last is None:
            return None

        def piece(name: str, identifier: str, type_id: int) -> dict[str, Any]:
            return {name: {"id": identifier, "type_id": type_id}}

        begin = [] if first is None else [piece("SpecialToken", first, 0)]
        one, two = piece("Sequence", "A", 0), piece("Sequence", "B", 1)
        doubles = self._get("add_sep_token", bool)
        if doubles is None or not self._get("add_eos_token", bool):
            doubles = doubles_separator
        between = [] if last is None or not doubles else [piece("SpecialToken", last, 0)]
        end_one, end_two = ([] if last is None else [piece("SpecialToken", last, type_id)] for type_id in (0, 1))
        return {
            "type": "TemplateProcessing",
            "single": [*begin, one, *end_one],
            "pair": [*begin, one, *end_one, *between, two, *end_two],
            "special_tokens": {
                token: {"id": token, "ids": [self._vocab[token]], "tokens": [token]}
                for token in (first, last)
                if token is not None
            },
        }

    def _added(self, flag: str, key: str, *, default: bool = False) -> str | None:
        """The token that the metadata add to each text, if they do."""
        said, token_id = self._get(flag, bool), self._token_id(f"{key}_token_id")
        adds = default if said is None else said
        return self.tokens[token_id] if adds and token_id is not None else None

    def _merges(self) -> list[tuple[str, str]]:
        found, vocab = [], self._vocab
        for merge in self._list("merges", str):
            first, _, second = merge.partition(" ")
            if first not in vocab or second not in vocab:
                raise StartupError(f"{_PREFIX}merges has {shorten(merge)}, which is no pair of tokens")
            if first + second not in vocab:
                raise StartupError(f"{_PREFIX}merges has {shorten(merge)}, which gives no token")
            found.append((first, second))
        return found

    def _merges_of_scores(self) -> list[tuple[str, str]]:
        """Every way to build a token from two others, the token with the highest score first."""
        scores = self._scores()
        found = []
        for index, (token, kind) in enumerate(zip(self.tokens, self._kinds, strict=True)):
            if kind == _Kind.NORMAL and len(token) <= _MAX_PIECE_CHARACTERS:
                pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
                found += [(-scores[index], index, a, b) for a, b in pairs if a in self._vocab and b in self._vocab]
        return [(a, b) for _, _, a, b in sorted(found)]

    def _scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise StartupError(f"{_PREFIX}scores has {len(scores)} items for {len(self.tokens)} tokens")
        return scores

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


def _with_hashes(token: str, kind: int) -> str:
    """A token of BERT as in vocab.txt. In GGUF files words begin with a mark, and not the other pieces."""
    if kind == _Kind.CONTROL or (token[0] == "[" and token[-1] == "]"):
        return token
    return token[1:] if token[0] == _SPACE and len(token) > 1 else f"##{token}"


def check_tokenizer(tokenizer_json: dict[str, Any]) -> str:
    """Return the text if the tokenizers library accepts it. Raises StartupError."""
    # Not needed by a model whose files are already there.
    from penstock.process.native_libraries import check_readable

    text = msgspec.json.encode(tokenizer_json)
    try:
        check_readable(text)
    except ValueError as error:  # LibraryError too
        raise StartupError(f"the file's tokenizer cannot be used: {shorten(str(error))}") from None
    return text.decode()
