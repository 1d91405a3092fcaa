"""tiktoken files and tekken.json: byte-level BPE whose merges follow from the ranks of the tokens.

A tiktoken file names neither its way to split text nor its special tokens: the code of the model's tokenizer class has
them. Such code is not run, so the classes are listed here. tekken.json has all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.gguf.tokenizer import GgufTokenizer
from penstock.backend.checkpoint.other_layouts.added_tokens import AddedTokens, metadata_of
from penstock.backend.errors import StartupError

_EXTRAS = tuple(f"<|extra_{number}|>" for number in range(205))
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", re.ASCII)


class _TiktokenClass(NamedTuple):
    split: str
    """A name of `tokenizer.ggml.pre`."""
    specials: tuple[str, ...] = ()
    """Special tokens after the ranks. Without them tokenizer_config.json has all."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Keys that tokenizer_config.json may lack."""
    max_ranks: int | None = None


_TIKTOKEN_CLASSES = {
    "QWenTokenizer": _TiktokenClass("qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRAS)),
    "HYTokenizer": _TiktokenClass(
        "qwen2", ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRAS)
    ),
    "TikTokenTokenizer": _TiktokenClass("kimi-k2"),
}
"""Qwen 1, Hunyuan, Kimi and Moonlight."""
_LLAMA3 = _TiktokenClass(
    "llama-bpe",
    (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
    ),
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "add_bos_token": True},
    max_ranks=128_000,
)
"""Its tokenizer.model, with the names since 3.1: until then some of these tokens were reserved. Llama 4's is larger,
and texts are split otherwise."""
_LLAMA3_CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizer", "PreTrainedTokenizerFast")


def is_rank_file(path: Path) -> bool:
    """Whether the file has lines of a token in base64 and its rank."""
    with path.open("rb") as file:
        return _LINE.match(file.readline(4096)) is not None


def convert_tiktoken(
    path: Path, config: Mapping[str, Any], added: AddedTokens
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The tokenizer.json, and defaults of tokenizer_config.json.

    Raises StartupError, and whatever the libraries raise for a file that is none.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    name = config.get("tokenizer_class")
    is_llama3 = path.name == "tokenizer.model" and name in _LLAMA3_CLASSES
    kind = _LLAMA3 if is_llama3 else _TIKTOKEN_CLASSES.get(str(name))
    if kind is None:
        known = ", ".join(_TIKTOKEN_CLASSES)
        raise StartupError(
            f"tokenizer_class is {shorten(name)}, and the way it splits text is in its code; known are {known}"
        )
    ranks, merges = TikTokenConverter(str(path)).extract_vocab_merges_from_model(str(path))
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise StartupError(f"its {len(tokens)} ranks are not 0 to {len(tokens) - 1}")
    if kind.max_ranks is not None and len(tokens) > kind.max_ranks:
        raise StartupError(f"it has {len(tokens)} ranks; Llama 3 has {kind.max_ranks}, and others split text otherwise")
    for index, special in enumerate(kind.specials, len(tokens)):
        added.by_id.setdefault(index, (special, True))
    tokenizer = GgufTokenizer(
        metadata_of(tokens, [1] * len(tokens), {**kind.settings, **config}, added)
        | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": kind.split,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }
    ).tokenizer_json(adds_end=True)
    tokenizer["model"]["ignore_merges"] = True  # tiktoken looks up whole words first
    return tokenizer, kind.settings


def convert_tekken(path: Path) -> dict[str, Any]:
    """The tokenizer.json. Raises ImportError for a file that does not list its special tokens, if mistral-common, which
    knows them, is missing."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    from penstock.process.native_libraries import begin_texts_with

    tokenizer = MistralConverter(str(path)).converted()
    begin_texts_with(tokenizer, "<s>")
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return made
