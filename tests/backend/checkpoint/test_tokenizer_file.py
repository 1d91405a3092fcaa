"""The number of token ids of a tokenizer.json, for every kind of model that the tokenizers library has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from penstock.backend.checkpoint.files.tokenizer_file import count_token_ids
from penstock.backend.errors import StartupError

VOCAB = {"a": 0, "b": 1, "[UNK]": 6}


@pytest.mark.parametrize(
    ("model", "num_token_ids"),
    [
        (BPE(vocab=VOCAB, merges=[]), 7),
        (WordLevel(vocab=VOCAB, unk_token="[UNK]"), 7),
        (WordPiece(vocab=VOCAB, unk_token="[UNK]"), 7),
        (Unigram([("a", -1.0), ("b", -2.0)]), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_are_counted_by_the_highest_id_with_added_tokens(
    model: Any, num_token_ids: int, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count_token_ids(tmp_path) == (num_token_ids, num_token_ids)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count_token_ids(tmp_path) == (num_token_ids, max(num_token_ids, tokenizer.token_to_id("<|end|>") + 1))


def test_directory_without_a_tokenizer_has_no_count(tmp_path: Path) -> None:
    assert count_token_ids(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not a JSON object"), (json.dumps({"model": {"vocab": {"a": "one"}}}), "model.vocab")],
)
def test_tokenizer_that_cannot_be_read_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(StartupError, match=reason):
        count_token_ids(tmp_path)
