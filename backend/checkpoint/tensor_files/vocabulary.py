"""The size of a vocabulary that was resized after config.json was written."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.config.tensors import EMBEDDING
from penstock.backend.checkpoint.files.layout import INDEX_FILE, read_index, weight_files
from penstock.backend.checkpoint.files.tokenizer_file import count_token_ids
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_NAMES = (EMBEDDING, EMBEDDING.removeprefix("model."))


def fit_vocab_size(model_dir: Path, vocab_size: int, names: Collection[str] = _NAMES) -> int:
    """config.json's vocab_size, corrected by the rows of the embedding, which has one of these names.

    Fewer rows are all that there are. Of more rows only those count that the tokenizer has tokens for: the others are
    padding, which must not be sampled. Reads one header; without weights the size stays.
    """
    rows = count_rows(model_dir, names)
    if rows is None or rows == vocab_size:
        return vocab_size
    if rows < vocab_size:
        return max(rows, 1)
    counts = count_token_ids(model_dir)
    return max(vocab_size, min(rows, 0 if counts is None else counts.with_added))


def count_rows(model_dir: Path, tensors: Collection[str]) -> int | None:
    """The rows of the first of these tensors that a checkpoint in safetensors has. Raises StartupError."""
    names = weight_files(model_dir)
    index = model_dir / INDEX_FILE
    if len(names) > 1 and index.exists():
        weight_map = read_index(index)
        names = tuple(weight_map[name] for name in tensors if name in weight_map)
    for path in (model_dir / name for name in names if (model_dir / name).exists()):
        with closing(SafetensorsFile(path)) as file:
            found = next((file.tensors[name] for name in tensors if name in file.tensors), None)
        if found is not None and len(found.shape) == 2:
            return found.shape[0]
    return None
