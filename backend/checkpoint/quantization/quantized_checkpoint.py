"""A checkpoint whose linears are quantised, layer by layer: read from the file that keeps them, or made on the way.

    with open_quantized(model_dir, config, quantization) as weights:
        layer = weights.layer(0, dtype)

Of the original linears only a few blocks of rows are in memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config.tensors import LINEARS, LayerWeights, layer_specs
from penstock.backend.checkpoint.files.progress import LOADING, Progress, Work, make_progress
from penstock.backend.checkpoint.quantization.cached_file import (
    CachedFile,
    CachedFileWriter,
    CachedForm,
    OutdatedFileError,
    UnusableFileError,
)
from penstock.backend.checkpoint.quantization.modes import (
    LM_HEAD,
    Quantization,
    check_sizes,
    has_cpu_kernels,
    linear_name,
    linear_specs,
    stacked_shape,
)
from penstock.backend.checkpoint.quantization.quantizer import (
    BLOCK_VALUES,
    UnquantizableError,
    quantize,
    quantize_bytes,
    quantize_to_float8,
)
from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form, Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
)
from penstock.backend.checkpoint.weights import DecoderWeights, open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.process.private_directory import UnsafeDirectory

logger = logging.getLogger("penstock.backend")


class QuantizedCheckpoint:
    """The weights of a decoder, as `DecoderWeights`, with quantised linears. Use it in a `with` block.

    If the block ends without an error, and all linears were made in it, their file is complete.
    """

    def __init__(
        self,
        config: DecoderConfig,
        quantization: Quantization,
        plain: DecoderWeights,
        kept: CachedFile | None,
        writer: CachedFileWriter | None,
    ) -> None:
        """Owns plain, kept and writer. With kept, writer is None."""
        self._config = config
        self._quantization = quantization
        self._specs = linear_specs(config)
        self._plain = plain
        self._kept = kept
        self._writer = writer

    def __enter__(self) -> QuantizedCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._plain.close()
        if self._kept is not None:
            self._kept.close()
        if self._writer is not None:
            if kind is None and self._writer.is_complete:
                self._keep(self._commit)
            else:
                self._writer.discard()

    def choose_dtype(self, requested: str, fp16_as: Dtype = Dtype.BF16) -> Dtype:
        """As `DecoderWeights.choose_dtype`. It applies to activations, and to an embedding that is not
        lm_head as well."""
        return self._plain.choose_dtype(requested, fp16_as)

    def embedding(self, dtype: Dtype) -> Tensor | QuantizedWeight:
        return self._linear(LM_HEAD) if self._config.tie_embeddings else self._plain.embedding(dtype)

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[QuantizedWeight]:  # noqa: ARG002 - what is not quantised stays fp32
        layout = layer_specs(self._config, index)
        fields: dict[str, Any] = {
            field: self._linear(linear_name(index, field))
            if field in LINEARS
            else self._plain.stacked(specs, Dtype.FP32)
            for field, specs in layout.items()
        }
        return LayerWeights(**fields)

    def final_norm(self, dtype: Dtype) -> Tensor:  # noqa: ARG002 - it stays fp32
        return self._plain.final_norm(Dtype.FP32)

    def lm_head(self, dtype: Dtype) -> QuantizedWeight | None:  # noqa: ARG002 - it is quantised
        return self._linear(LM_HEAD) if self._config.has_own_lm_head else None

    def _linear(self, name: str) -> QuantizedWeight:
        if self._kept is not None:
            try:
                return self._kept.read(name, self._plain.count_read)
            except UnusableFileError as error:
                # What was read before was whole. The next start finds no file and makes a new one.
                logger.warning("%s; the rest is quantised again, and all at the next start", error)
                self._kept.remove()
                self._kept = None
        weight = self._quantize(name)
        if self._writer is not None:
            self._keep(partial(self._writer.write, name, weight))
        return weight

    def _quantize(self, name: str) -> Int8Weight | Int4Weight | GroupedWeight | Float8Weight:
        specs = self._specs[name]
        blocks = (block for spec in specs for block in self._plain.row_blocks(spec, BLOCK_VALUES))
        try:
            form = self._quantization.form_of(name, stacked_shape(specs)[1])
            if isinstance(form, Float8Form):
                return quantize_to_float8(blocks, stacked_shape(specs))
            if isinstance(form, GroupedForm):
                return quantize_bytes(blocks, stacked_shape(specs), form)
            return quantize(blocks, stacked_shape(specs), form.group_size)
        except UnquantizableError as error:
            ends = accumulate(spec.shape[0] for spec in specs)
            tensor = next(spec.name for spec, end in zip(specs, ends, strict=True) if error.row < end)
            raise StartupError(
                f"--quantize is {self._quantization.name}; tensor {tensor} {error}: use another checkpoint, or none"
            ) from None

    def _commit(self) -> None:
        if self._writer is not None:
            logger.info("The %s weights are kept in %s", self._quantization.name, self._writer.commit())

    def _keep(self, do: Callable[[], None]) -> None:
        """Write to the kept file; give it up if that fails."""
        try:
            do()
        except OSError as error:
            _warn_not_kept(error)
            if self._writer is not None:
                self._writer.discard()
                self._writer = None


def open_served_weights(
    model_dir: Path,
    config: DecoderConfig,
    quantization: Quantization | None,
    keeps: Callable[[WeightForm], bool] = has_cpu_kernels,
    *,
    keeps_file: bool = True,
) -> DecoderWeights | QuantizedCheckpoint:
    """Open the weights in a mode of --quantize. keeps: see `DecoderWeights`. keeps_file: see `open_quantized`. Raises
    StartupError."""
    if quantization is None:
        return open_weights(model_dir, config, keeps=keeps)
    return open_quantized(model_dir, config, quantization, keeps_file=keeps_file)


def open_quantized(
    model_dir: Path,
    config: DecoderConfig,
    quantization: Quantization,
    make_progress: Callable[[int, Work], Progress] = make_progress,
    *,
    keeps_file: bool = True,
) -> QuantizedCheckpoint:
    """Open a checkpoint, and the file of its quantised weights: to read it, or to write it if there is none. Callers
    that keep the weights in another form need no such file (keeps_file).

    Nothing is loaded yet. make_progress receives the number of bytes to read and the name of the work. Raises
    StartupError for a model whose sizes the mode does not divide, and as `open_weights`; never because of the file.
    """
    check_sizes(quantization, config)
    with ExitStack() as undo:
        kept, writer = _open_kept(model_dir, config, quantization) if keeps_file else (None, None)
        if kept is not None:
            undo.callback(kept.close)
        if writer is not None:
            undo.callback(writer.discard)
        work = Work(f"Quantising weights to {quantization.name}", "Quantised") if kept is None else LOADING
        kept_bytes = 0 if kept is None else kept.num_bytes
        unread = {spec.name for specs in linear_specs(config).values() for spec in specs} if kept else ()
        plain = open_weights(
            model_dir, config, lambda plain_bytes: make_progress(kept_bytes + plain_bytes, work), unread
        )
        undo.pop_all()
        return QuantizedCheckpoint(config, quantization, plain, kept, writer)


def _open_kept(
    model_dir: Path, config: DecoderConfig, quantization: Quantization
) -> tuple[CachedFile | None, CachedFileWriter | None]:
    """Open the file if it is usable, else a writer if it can be written. The log says why it is not."""
    try:
        form = CachedForm.of(model_dir, config, quantization)
        try:
            return CachedFile(form), None
        except FileNotFoundError:
            pass
        except OutdatedFileError as error:
            logger.info("%s: the weights are quantised again", error)
        except UnusableFileError as error:
            logger.warning("%s: the weights are quantised again", error)
        return None, CachedFileWriter(form)
    except (OSError, UnsafeDirectory) as error:
        _warn_not_kept(error)
        return None, None


def _warn_not_kept(error: Exception) -> None:
    logger.warning("The quantised weights cannot be kept, so the next start quantises them again: %s", error)
