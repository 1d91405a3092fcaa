"""The weights of a checkpoint as canonical tensors, one layer at a time.

    with open_weights(model_dir, config) as weights:
        dtype = weights.choose_dtype("auto")
        embedding = weights.embedding(dtype)
        for i in range(config.num_layers):
            layer = weights.layer(i, dtype)

Canonical means: q, k and v are stacked into one matrix, gate and up into another, whatever the checkpoint stores. Every
tensor is a new copy that the caller owns; only one window of the file is in memory beside them. The exception is
`mapped_embedding`, for an embedding table that is not held in memory.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch

from penstock.backend.checkpoint.config_json import read_declared_dtype
from penstock.backend.checkpoint.json_file import shorten
from penstock.backend.checkpoint.layout import INDEX_FILE, SINGLE_FILE, read_index
from penstock.backend.checkpoint.progress import make_progress
from penstock.backend.checkpoint.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from penstock.backend.checkpoint.tensors import (
    EMBEDDING,
    LayerWeights,
    TensorSpec,
    embedding_spec,
    expected_tensors,
    final_norm_specs,
    layer_specs,
    lm_head_spec,
)
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.progress import Progress
    from penstock.backend.checkpoint.safetensors_file import StoredTensor


class DecoderWeights:
    """An open checkpoint that has every needed tensor. Close it, or use it in a `with` block."""

    def __init__(
        self,
        config: DecoderConfig,
        files: dict[str, SafetensorsFile],
        declared_dtype: torch.dtype | None,
        progress: Progress,
        closers: ExitStack,
    ) -> None:
        """files: tensor name → the open file that has it. closers closes the files and the progress."""
        self._config = config
        self._files = files
        self._declared_dtype = declared_dtype
        self._progress = progress
        self._closers = closers

    def __enter__(self) -> DecoderWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end the progress report. Idempotent."""
        self._closers.close()

    def count_read(self, num_bytes: int) -> None:
        """Add to the progress what was read from other files."""
        self._progress.advance(num_bytes)

    @property
    def stored_bytes(self) -> int:
        """Size of all needed tensors in the checkpoint's own dtype."""
        return _stored_bytes(self._config, self._files)

    def choose_dtype(self, requested: str, fp16_as: torch.dtype = torch.bfloat16) -> torch.dtype:
        """The dtype to compute in: "bf16", "fp32", or for "auto" the dtype in config.json, else the stored one.

        fp16 becomes fp16_as: bf16 has the same size, and CPUs support it. Raises StartupError for another name.
        """
        stored = FLOAT_DTYPES[_stored(self._files, EMBEDDING).dtype]
        return choose_dtype(requested, self._declared_dtype or stored, fp16_as)

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """[vocab_size, hidden_size]"""
        return self.stacked((embedding_spec(self._config),), dtype)

    def mapped_embedding(self) -> Tensor:
        """[vocab_size, hidden_size] in the stored dtype, mapped from the file and not copied.

        For row lookups: only the rows that are used come into memory. Stays valid after close.
        """
        return self._files[EMBEDDING].map(_stored(self._files, EMBEDDING))

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor]:
        layout = layer_specs(self._config, index)
        return LayerWeights(**{field: self.stacked(specs, dtype) for field, specs in layout.items()})

    def final_norm(self, dtype: torch.dtype) -> Tensor:
        """[hidden_size]; with a bias [2 * hidden_size]"""
        return self.stacked(final_norm_specs(self._config), dtype)

    def lm_head(self, dtype: torch.dtype) -> Tensor | None:
        """[vocab_size, hidden_size]; None if the embedding is used instead."""
        return None if self._config.tie_embeddings else self.stacked((lm_head_spec(self._config),), dtype)

    def stacked(self, specs: tuple[TensorSpec, ...], dtype: torch.dtype) -> Tensor:
        """The tensors stacked along their first dimension."""
        rows = sum(spec.shape[0] for spec in specs)
        stacked = torch.empty(rows, *specs[0].shape[1:], dtype=dtype)
        row = 0
        for spec in specs:
            target = stacked[row : row + spec.shape[0]]
            self._files[spec.name].copy(_stored(self._files, spec.name), target, self._progress.advance)
            row += spec.shape[0]
        return stacked

    def row_blocks(self, spec: TensorSpec, max_values: int) -> Iterator[Tensor]:
        """A matrix in blocks of whole rows, fp32: at most max_values numbers, but at least one row."""
        outputs, inputs = spec.shape
        stored, file = _stored(self._files, spec.name), self._files[spec.name]
        step = max(1, max_values // inputs)
        for first in range(0, outputs, step):
            block = torch.empty(min(step, outputs - first), inputs)
            file.copy(stored.rows(first, len(block)), block, self._progress.advance)
            yield block


def open_weights(
    model_dir: Path,
    config: DecoderConfig,
    make_progress: Callable[[int], Progress] = make_progress,
    unread: Collection[str] = (),
) -> DecoderWeights:
    """Open model.safetensors, or the shards of its index, and check every tensor that config needs.

    Nothing is loaded yet. Other tensors are ignored. make_progress receives the number of bytes to load, without the
    tensors named in unread. Raises StartupError with the tensor's name and both shapes, or both sizes if a file is
    truncated.
    """
    with ExitStack() as closers:
        files, where = _open_files(model_dir, closers)
        for spec in expected_tensors(config):
            _check(spec, files, where)
        progress = closers.enter_context(closing(make_progress(_stored_bytes(config, files, unread))))
        return DecoderWeights(config, files, read_declared_dtype(model_dir), progress, closers.pop_all())


def choose_dtype(requested: str, own: torch.dtype, fp16_as: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's own, with fp16_as for fp16. Raises StartupError."""
    match requested:
        case "bf16":
            return torch.bfloat16
        case "fp32":
            return torch.float32
        case "auto":
            return fp16_as if own is torch.float16 else own
    raise StartupError(f"dtype is {shorten(requested)}; it must be auto, bf16 or fp32")


def _open_files(model_dir: Path, closers: ExitStack) -> tuple[dict[str, SafetensorsFile], str]:
    """Tensor name → the file that has it, closed by closers; and a description of the files for messages."""
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if single.exists():
        file = closers.enter_context(closing(SafetensorsFile(single)))
        return dict.fromkeys(file.tensors, file), str(single)
    if not index.exists():
        raise StartupError(f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are loaded")
    weight_map = read_index(index)
    shards = {
        name: closers.enter_context(closing(SafetensorsFile(model_dir / name)))
        for name in sorted(set(weight_map.values()))
    }
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise StartupError(f"tensor {tensor} is missing from {model_dir / name}, where {INDEX_FILE} says it is")
    return {tensor: shards[name] for tensor, name in weight_map.items()}, f"the files of {index}"


def _check(spec: TensorSpec, files: dict[str, SafetensorsFile], where: str) -> None:
    if spec.name not in files:
        raise StartupError(f"tensor {spec.name}, expected with shape {list(spec.shape)}, is missing from {where}")
    stored, path = _stored(files, spec.name), files[spec.name].path
    if stored.shape != spec.shape:
        raise StartupError(
            f"{path}: tensor {spec.name} has shape {list(stored.shape)}; config.json makes it {list(spec.shape)}"
        )
    if stored.dtype not in FLOAT_DTYPES:
        raise StartupError(
            f"{path}: tensor {spec.name} has dtype {shorten(stored.dtype)}; it must be {', '.join(FLOAT_DTYPES)}"
        )


def _stored(files: dict[str, SafetensorsFile], name: str) -> StoredTensor:
    return files[name].tensors[name]


def _stored_bytes(config: DecoderConfig, files: dict[str, SafetensorsFile], unread: Collection[str] = ()) -> int:
    return sum(_stored(files, spec.name).num_bytes for spec in expected_tensors(config) if spec.name not in unread)
