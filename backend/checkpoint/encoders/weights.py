"""The weights of an encoder's checkpoint as canonical tensors, one layer at a time.

Canonical means: q, k and v are stacked into one matrix, and so are gate and up, in this order. A norm is [weight |
bias], with zeros for a bias that the model does not have. Every tensor is a new copy that the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.tensors import TensorSpec
from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig, HeadLayer
from penstock.backend.checkpoint.encoders.tensors import (
    EncoderLayerWeights,
    HeadLayerWeights,
    layer_specs,
    linear_specs,
    norm_specs,
    table_specs,
)
from penstock.backend.checkpoint.files.layout import SINGLE_FILE
from penstock.backend.checkpoint.files.progress import Progress, make_progress
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.formats.stored_weight import StoredWeight, find_weight
from penstock.backend.checkpoint.formats.tensor_file import TensorFile
from penstock.backend.checkpoint.tensor_files.opening import crop_rows, rename_tensors
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.checkpoint.tensor_files.unplaced import is_beside_encoder, refuse_unplaced
from penstock.backend.checkpoint.weights import open_tensor_files

_OLD_NORM_NAMES = {".gamma": ".weight", ".beta": ".bias"}
"""Names of norms' tensors in files that were converted from TensorFlow."""


class EncoderWeights:
    """An open checkpoint that has every needed tensor. Use it in a `with` block."""

    def __init__(
        self,
        config: EncoderConfig,
        prefix: str,
        stored: dict[str, StoredWeight],
        progress: Progress,
        closers: ExitStack,
    ) -> None:
        """prefix begins all names. stored contains every needed tensor, by name."""
        self._config = config
        self._names = config.names
        self._prefix = prefix
        self._stored = stored
        self._progress = progress
        self._closers = closers

    def __enter__(self) -> EncoderWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closers.close()

    def words(self) -> Tensor:
        """[vocab_size, hidden_size] fp32"""
        return self._read((table_specs(self._config, self._prefix)["words"],))

    def table(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The table of "positions", "token_types", "relative_bias" or "relative_positions"; None if there is none."""
        spec = table_specs(self._config, self._prefix).get(name)
        return None if spec is None else self._read((spec,), dtype)

    def layer(self, index: int) -> EncoderLayerWeights:
        """In fp32."""
        specs = layer_specs(self._config, self._prefix, index)
        fields = {field: self._read(each) if each else None for field, each in specs.items()}
        for field in ("attention_norm", "mlp_norm"):
            fields[field] = self._norm(specs[field]) if specs[field] else None
        if self._names.up_before_gate:
            for field in ("mlp_in", "mlp_in_bias"):
                fields[field] = _swap_halves(fields[field])
        return EncoderLayerWeights(**fields)  # type: ignore[arg-type]

    def embedding_norm(self) -> Tensor:
        return self._required_norm(self._names.embedding_norm)

    def relative_norm(self) -> Tensor:
        """The norm of the table "relative_positions"."""
        return self._required_norm(self._names.relative_norm)

    def final_norm(self) -> Tensor | None:
        return None if self._names.final_norm is None else self._required_norm(self._names.final_norm)

    def head_layer(self, layer: HeadLayer) -> HeadLayerWeights:
        """In fp32."""
        specs = {spec.name: spec for spec in linear_specs(layer)}
        weight = None if layer.weight is None else self._read((specs[layer.weight],))
        bias = None if layer.bias is None else self._read((specs[layer.bias],))
        norm = None if layer.norm is None else self._norm(norm_specs(layer.norm, layer.outputs, biased=layer.norm_bias))
        return HeadLayerWeights(weight, bias, norm)

    def _required_norm(self, name: str) -> Tensor:
        config = self._config
        return self._norm(norm_specs(self._prefix + name, config.hidden_size, biased=config.norm_bias))

    def _norm(self, specs: tuple[TensorSpec, ...]) -> Tensor:
        norm = self._read(specs)
        return norm if len(specs) == 2 else torch.cat([norm, torch.zeros_like(norm)])

    def _read(self, specs: tuple[TensorSpec, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensors stacked along their first dimension."""
        stacked = torch.empty(sum(spec.shape[0] for spec in specs), *specs[0].shape[1:], dtype=dtype)
        row = 0
        for spec in specs:
            self._stored[spec.name].copy(stacked[row : row + spec.shape[0]], self._progress.advance)
            row += spec.shape[0]
        return stacked


def open_encoder(
    model_dir: Path, config: EncoderConfig, make_progress: Callable[[int], Progress] = make_progress
) -> EncoderWeights:
    """Open the files and check every tensor that config needs. Nothing is loaded yet; GGUF's blocks are dequantised.

    Raises StartupError with the tensor's name and both shapes.
    """
    with ExitStack() as closers:
        files, where = open_tensor_files(model_dir, closers)
        files = _with_new_names(files) | _open_folders(model_dir, config, closers)
        prefix = _find_prefix(config, files)
        crop_rows(files, _tables_of_words(config, prefix), config.vocab_size)
        formats = read_stored_formats(model_dir)
        of = formats.of if formats.cover_embedding else PLAIN.of  # other methods are meant for decoders
        stored = {spec.name: find_weight(spec, of(spec.name), files, where) for spec in _needed(config, prefix)}
        placed = {name for weight in stored.values() for name in weight.names}
        is_harmless = partial(is_beside_encoder, prefix, config.names.layer, config.num_layers)
        refuse_unplaced(files.values(), placed, is_harmless, "an encoder")
        num_bytes = sum(weight.num_bytes for weight in stored.values())
        progress = closers.enter_context(closing(make_progress(num_bytes)))
        return EncoderWeights(config, prefix, stored, progress, closers.pop_all())


def _needed(config: EncoderConfig, prefix: str) -> Iterator[TensorSpec]:
    names = config.names
    yield from table_specs(config, prefix).values()
    relative_norm = names.relative_norm if config.relative_span else None
    for norm in (names.embedding_norm, relative_norm, names.final_norm):
        if norm is not None:
            yield from norm_specs(prefix + norm, config.hidden_size, biased=config.norm_bias)
    for index in range(config.num_layers):
        for specs in layer_specs(config, prefix, index).values():
            yield from specs
    for head in config.heads:
        for layer in head.layers:
            yield from linear_specs(layer)
            if layer.norm is not None:
                yield from norm_specs(layer.norm, layer.outputs, biased=layer.norm_bias)


def _tables_of_words(config: EncoderConfig, prefix: str) -> Iterator[str]:
    """The tensors with a row for each token."""
    yield table_specs(config, prefix)["words"].name
    for head in config.heads:
        yield from (layer.bias for layer in head.layers if layer.weight is None and layer.bias is not None)


def _find_prefix(config: EncoderConfig, files: dict[str, TensorFile]) -> str:
    """Find the prefix that the files use. If they use none, return the first, so that the error names a
    missing tensor."""
    prefixes = config.names.prefixes
    return next((prefix for prefix in prefixes if f"{prefix}{config.names.words}.weight" in files), prefixes[0])


def _open_folders(model_dir: Path, config: EncoderConfig, closers: ExitStack) -> dict[str, TensorFile]:
    """Open the tensors of modules with their own folder, whose name becomes their prefix."""
    found: dict[str, TensorFile] = {}
    weights = (layer.weight for head in config.heads for layer in head.layers)
    for folder in sorted({name.partition("/")[0] for name in weights if name is not None and "/" in name}):
        file = closers.enter_context(closing(SafetensorsFile(model_dir / folder / SINGLE_FILE)))
        file.tensors = {f"{folder}/{name}": tensor for name, tensor in file.tensors.items()}
        found |= dict.fromkeys(file.tensors, file)
    return found


def _with_new_names(files: dict[str, TensorFile]) -> dict[str, TensorFile]:
    """Rename the norms of old files."""

    def renamed(name: str) -> str:
        stem, dot, end = name.rpartition(".")
        return stem + _OLD_NORM_NAMES.get(dot + end, dot + end)

    return rename_tensors(files, renamed)


def _swap_halves(stacked: Tensor | None) -> Tensor | None:
    if stacked is None:
        return None
    first, second = stacked.chunk(2)
    return torch.cat([second, first])
