"""Files that are read by a tokenizer class of transformers: vocab.txt, vocab.json, and SentencePiece of encoders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.other_layouts.directory import FILES_OF_CLASSES
from penstock.backend.checkpoint.other_layouts.sentencepiece_file import read_normalizer
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def convert_by_class(source: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokenizer.json, and the model's own special tokens, such as cls_token.

    Raises StartupError, and whatever the library raises.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, local_files_only=True, trust_remote_code=False)
    found, named = type(tokenizer).__name__, config.get("tokenizer_class")
    known = FILES_OF_CLASSES[source.name]
    if found not in known or (isinstance(named, str) and named.removesuffix("Fast") != found):
        raise StartupError(
            f"tokenizer_class is {shorten(named)}, which transformers reads as {found}; known are {', '.join(known)}"
        )
    made: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    if source.suffix == ".model":
        # DeBERTa's class leaves the model's own normalizer out.
        own = made["normalizer"] or {}
        lowercase = [each for each in own.get("normalizers", [own]) if each.get("type") == "Lowercase"]
        made["normalizer"] = {"type": "Sequence", "normalizers": lowercase + read_normalizer(source)}
    return made, {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
