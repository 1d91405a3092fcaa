"""The weights of a checkpoint as canonical tensors, one layer at a time.

    with open_weights(model_dir, config) as weights:
        dtype = weights.choose_dtype("auto")
        embedding = weights.embedding(dtype)
        for i in range(config.num_layers):
            layer = weights.layer(i, dtype)

Canonical means: q, k and v are stacked into one matrix, gate and up into another, whatever the checkpoint stores. Every
tensor is a new copy that the caller owns. In addition, only one window of the file is in memory, and of a quantised
checkpoint the stored matrices of one linear.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import (
    EMBEDDING,
    FLOAT_FIELDS,
    INPUT_TABLE,
    LINEARS,
    STACKED_IN_PARTS,
    LayerWeights,
    TensorSpec,
    embedding_spec,
    expected_tensors,
    final_norm_specs,
    layer_specs,
    linear_names,
    lm_head_spec,
)
from penstock.backend.checkpoint.config_json import choose_dtype, read_declared_dtype
from penstock.backend.checkpoint.files.progress import Progress, make_progress
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
from penstock.backend.checkpoint.formats.stored_weight import FormattedMatrix, PlainTensor, StoredWeight, find_weight
from penstock.backend.checkpoint.formats.tensor_file import TensorFile
from penstock.backend.checkpoint.gguf.directory import open_gguf_links
from penstock.backend.checkpoint.other_layouts.mistral_layout import EMBEDDING_NAME, hf_name
from penstock.backend.checkpoint.tensor_files.opening import (
    fit_to_decoder,
    open_safetensors,
    rename_tensors,
    split_experts,
)
from penstock.backend.checkpoint.tensor_files.unplaced import (
    check_tied_head,
    is_beside_decoder,
    refuse_unplaced,
    unused_heads,
)
from penstock.backend.checkpoint.weight_forms.quantized_forms import WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.checkpoint.weight_forms.stacked_weights import stack_weights, stacked_form
from penstock.backend.dtypes import Dtype
from penstock.backend.lazy_torch import Tensor, torch

logger = logging.getLogger("penstock.backend")

_FLOAT8 = "F8_E4M3"
_MATRIX_DIMENSIONS = 2


class DecoderWeights:
    """An open checkpoint that has every needed tensor. Close it, or use it in a `with` block."""

    def __init__(
        self,
        config: DecoderConfig,
        stored: Mapping[str, StoredWeight],
        declared_dtype: Dtype | None,
        progress: Progress,
        closers: ExitStack,
        keeps: Callable[[WeightForm], bool] = lambda _: False,
    ) -> None:
        """stored contains every needed tensor, by name. closers closes the files and the progress.

        Linears that are stored in a form for which keeps is true are returned in it; the others are dequantised.
        """
        self._config = config
        self._stored = stored
        self._declared_dtype = declared_dtype
        self._progress = progress
        self._closers = closers
        self._keeps = keeps
        self._num_packed = self._num_dequantized = 0

    def __enter__(self) -> DecoderWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end the progress report. Idempotent."""
        self._closers.close()
        if self._num_packed or self._num_dequantized:
            logger.info(
                "Of the checkpoint's quantised linears %d are multiplied as they are, %d were dequantised",
                self._num_packed,
                self._num_dequantized,
            )
            self._num_packed = self._num_dequantized = 0

    def count_read(self, num_bytes: int) -> None:
        """Add bytes that were read from other files to the progress."""
        self._progress.advance(num_bytes)

    @property
    def stored_bytes(self) -> int:
        """Size of all needed tensors in the checkpoint's own dtype."""
        return _stored_bytes(self._stored)

    def choose_dtype(self, requested: str, fp16_as: Dtype = Dtype.BF16) -> Dtype:
        """The dtype to compute in: "bf16", "fp32", or for "auto" the dtype in config.json, else the stored one.

        fp16 becomes fp16_as: bf16 has the same size, and CPUs support it. Raises StartupError for another name.
        """
        embedding = self._stored[EMBEDDING]
        own = embedding.dtype if isinstance(embedding, PlainTensor) else Dtype.BF16
        return choose_dtype(requested, self._declared_dtype or own, fp16_as)

    def embedding(self, dtype: Dtype) -> Tensor | QuantizedWeight:
        """[vocab_size, hidden_size]"""
        return self.linear((embedding_spec(self._config),), dtype)

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[Tensor | QuantizedWeight]:
        layout = layer_specs(self._config, index)
        fields: dict[str, Any] = {
            field: self.linear(specs, dtype, in_parts=field in STACKED_IN_PARTS)
            if field in LINEARS
            else self.stacked(specs, Dtype.FP32 if field in FLOAT_FIELDS else dtype)
            for field, specs in layout.items()
        }
        return LayerWeights(**fields)

    def final_norm(self, dtype: Dtype) -> Tensor:
        """[hidden_size]; with a bias [2 * hidden_size]"""
        return self.stacked(final_norm_specs(self._config), dtype)

    def lm_head(self, dtype: Dtype) -> Tensor | QuantizedWeight | None:
        """[vocab_size, hidden_size]; None if the embedding is used instead."""
        return self.linear((lm_head_spec(self._config),), dtype) if self._config.has_own_lm_head else None

    def linear(
        self, specs: tuple[TensorSpec, ...], dtype: Dtype, *, in_parts: bool = False
    ) -> Tensor | QuantizedWeight:
        """Like `stacked`, or in the checkpoint's own form. in_parts: each tensor may have another."""
        stored = [self._stored[spec.name] for spec in specs]
        matrices = [weight for weight in stored if isinstance(weight, FormattedMatrix)]
        if len(matrices) < len(stored):
            return self.stacked(specs, dtype)
        forms = [matrix.format.packed_form(matrix.shape) for matrix in matrices]
        form = stacked_form(forms, [matrix.shape[0] for matrix in matrices], self._keeps, in_parts=in_parts)
        if form is None:
            return self.stacked(specs, dtype)
        counts: list[int] = []
        packed = (matrix.load(counts.append).pack() for matrix in matrices)
        weight = stack_weights(packed, form, sum(spec.shape[0] for spec in specs))
        if weight is None:
            return self.stacked(specs, dtype)
        self._num_packed += 1
        self._progress.advance(sum(counts))
        return weight

    def stacked(self, specs: tuple[TensorSpec, ...], dtype: Dtype) -> Tensor:
        """The tensors stacked along their first dimension."""
        rows = sum(spec.shape[0] for spec in specs)
        stacked = torch.empty(rows, *specs[0].shape[1:], dtype=dtype.in_torch)
        self._num_dequantized += any(isinstance(self._stored[spec.name], FormattedMatrix) for spec in specs)
        row = 0
        for spec in specs:
            target = stacked[row : row + spec.shape[0]]
            self._stored[spec.name].copy(target, self._progress.advance)
            row += spec.shape[0]
        return stacked

    def row_blocks(self, spec: TensorSpec, max_values: int) -> Iterator[Tensor]:
        """A matrix in blocks of whole rows, fp32: at most max_values numbers, but at least one row."""
        return self._stored[spec.name].blocks(max_values, self._progress.advance)


def open_weights(
    model_dir: Path,
    config: DecoderConfig,
    make_progress: Callable[[int], Progress] = make_progress,
    unread: Collection[str] = (),
    keeps: Callable[[WeightForm], bool] = lambda _: False,
) -> DecoderWeights:
    """Open model.safetensors, or the shards of its index, and check every tensor that config needs.

    Nothing is loaded yet. Other tensors are refused, unless they change no result. make_progress receives the number of
    bytes to load, without the tensors named in unread. keeps: see `DecoderWeights`. Raises StartupError with the
    tensor's name and both shapes, or both sizes if a file is truncated.
    """
    with ExitStack() as closers:
        files, where = open_tensor_files(model_dir, closers)
        files = split_experts(fit_to_decoder(files, config.vocab_size), config)
        formats, expected = read_stored_formats(model_dir), tuple(expected_tensors(config))
        covered = _covered(formats, config, expected, files)
        stored = {
            spec.name: find_weight(spec, formats.of(spec.name) if spec.name in covered else None, files, where)
            for spec in expected
        }
        placed = {name for weight in stored.values() for name in weight.names}
        is_harmless = partial(
            is_beside_decoder, config.num_layers, unused_heads(config), num_shared=config.num_shared_layers
        )
        refuse_unplaced(files.values(), placed, is_harmless, f"a {config.architecture}")
        if config.tie_embeddings:
            check_tied_head(files)
        progress = closers.enter_context(closing(make_progress(_stored_bytes(stored, unread))))
        dtype = read_declared_dtype(model_dir)
        return DecoderWeights(config, stored, dtype, progress, closers.pop_all(), keeps)


def _covered(
    formats: StoredFormats, config: DecoderConfig, expected: Iterable[TensorSpec], files: Mapping[str, TensorFile]
) -> set[str]:
    """The weights that may be quantised."""
    if formats.marker is None:
        return {*linear_names(config), *((EMBEDDING, INPUT_TABLE) if formats.cover_embedding else ())}
    matrices = (spec.name for spec in expected if len(spec.shape) == _MATRIX_DIMENSIONS)
    return {name for name in matrices if f"{name.removesuffix('weight')}{formats.marker}" in files}


def open_tensor_files(model_dir: Path, closers: ExitStack) -> tuple[dict[str, TensorFile], str]:
    """Tensor name → its file, closed by closers; and a description of the files for messages."""
    ggufs = [closers.enter_context(closing(file)) for file in open_gguf_links(model_dir)]
    if ggufs:
        return {name: file for file in ggufs for name in file.tensors}, str(ggufs[0].path.resolve())
    files, where = open_safetensors(model_dir, closers)
    return (rename_tensors(files, hf_name) if EMBEDDING_NAME in files else files), where


def read_dequantized(model_dir: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a checkpoint in 8-bit floats, whatever its model: matrices of those in dtype, others as they are.

    Raises StartupError.
    """
    formats = read_stored_formats(model_dir)
    tensors: dict[str, Tensor] = {}
    scales: set[str] = set()
    with ExitStack() as closers:
        files, where = open_tensor_files(model_dir, closers)
        progress = closers.enter_context(closing(make_progress(sum(f.tensors[n].num_bytes for n, f in files.items()))))
        for name, file in files.items():
            stored = file.tensors[name]
            matrix = formats.of(name) if stored.dtype == _FLOAT8 else None
            if matrix is None:
                tensors[name] = file.read(stored, progress.advance)
                continue
            weight = find_weight(TensorSpec(name, stored.shape), matrix, files, where)
            tensors[name] = torch.empty(stored.shape, dtype=dtype)
            weight.copy(tensors[name], progress.advance)
            scales.update(set(weight.names) - {name})
    return {name: tensor for name, tensor in tensors.items() if name not in scales}


def _stored_bytes(stored: Mapping[str, StoredWeight], unread: Collection[str] = ()) -> int:
    return sum(weight.num_bytes for name, weight in stored.items() if name not in unread)
