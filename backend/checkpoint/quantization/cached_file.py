"""The file in the cache directory that keeps a model's quantised weights: safetensors, with checksums in its metadata.

There is one file for each checkpoint directory and mode. It is written under another name, without a header until all
tensors are there, and then renamed. Only this user or root can have written it; still, whatever is read is checked.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.fingerprint import weights_fingerprint
from penstock.backend.checkpoint.quantization.modes import Quantization, linear_specs, stacked_shape
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form, Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import GroupedWeight, Int4Weight, Int8Weight
from penstock.backend.errors import StartupError
from penstock.process.cache_directory import cache_directory, check_cached_file
from penstock.process.options import format_size
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory

FORMAT = "1"
"""Increase it when the quantiser or the tensors' form changes: files of other formats are made again."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "I8": torch.int8, "U8": torch.uint8}


class UnusableFileError(Exception):
    """The file's content is wrong. The message is one line, without the remedy."""


class OutdatedFileError(UnusableFileError):
    """The file is whole, but belongs to another state of the checkpoint or another version of the quantiser."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class CachedForm:
    """The file's place, and the content that it must have."""

    path: Path
    quantization: Quantization
    labels: dict[str, str]
    """Metadata that say which weights were quantised, and how."""
    parts: dict[str, StoredPart]

    @classmethod
    def of(cls, model_dir: Path, config: DecoderConfig, quantization: Quantization) -> CachedForm:
        """Raises UnsafeDirectory for a user without a home."""
        resolved = model_dir.resolve()
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", resolved.name)[:64]
        place = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
        labels = {
            "penstock.format": FORMAT,
            "penstock.quantization": quantization.name,
            "penstock.checkpoint": weights_fingerprint(model_dir),
        }
        form = quantization.name + ("-groups" if quantization.groups_bytes else "")
        path = cache_directory() / "quantized" / f"{readable}-{place}-{form}.safetensors"
        return cls(path, quantization, labels, _stored_parts(config, quantization))

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(part.num_bytes for part in self.parts.values())

    def header(self, checksums: dict[str, int]) -> bytes:
        """The header; its length does not depend on the checksums. Tensors follow in the order of `parts`."""
        entries: dict[str, object] = {
            "__metadata__": self.labels | {f"crc32 {name}": f"{checksums.get(name, 0):08x}" for name in self.parts}
        }
        end = 0
        for name, part in self.parts.items():
            begin, end = end, end + part.num_bytes
            entries[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _stored_parts(config: DecoderConfig, quantization: Quantization) -> dict[str, StoredPart]:
    """The tensors, widest dtype first so that every tensor is aligned."""
    parts: dict[str, StoredPart] = {}
    for name, specs in linear_specs(config).items():
        outputs, inputs = stacked_shape(specs)
        form = quantization.form_of(name, inputs)
        group_size = form.group_size
        if isinstance(form, Float8Form):
            parts[f"{name}.scales"] = StoredPart("F32", (outputs, 1))
            parts[f"{name}.values"] = StoredPart("U8", (outputs, inputs))
        elif isinstance(form, GroupedForm):
            parts[f"{name}.scales"] = StoredPart("F16", (outputs, inputs // form.group_size))
            parts[f"{name}.values"] = StoredPart("I8", (outputs, inputs))
        elif group_size is None:
            parts[f"{name}.scales"] = StoredPart("F32", (outputs,))
            parts[f"{name}.values"] = StoredPart("I8", (outputs, inputs))
        else:
            groups = (outputs, inputs // group_size)
            parts[f"{name}.scales"] = StoredPart("F16", groups)
            parts[f"{name}.zeros"] = StoredPart("U8", groups)
            parts[f"{name}.values"] = StoredPart("U8", (outputs, inputs // 2))
    return dict(sorted(parts.items(), key=lambda item: -_DTYPES[item[1].dtype].itemsize))


class CachedFile:
    """A file with the right labels and tensors; each tensor's content is checked when it is read. Close it."""

    def __init__(self, form: CachedForm) -> None:
        """Raises FileNotFoundError without a file, UnsafeDirectory if others can write its directory, OSError,
        UnusableFileError."""
        check_directory(form.path.parent, Trust.READABLE, create=False)
        try:
            check_cached_file(form.path)
            self._file = SafetensorsFile(form.path)
        except (StartupError, UnsafeDirectory) as error:
            raise UnusableFileError(str(error)) from None
        self._form = form
        try:
            self._checksums = self._read_labels()
        except BaseException:
            self.close()
            raise

    def _read_labels(self) -> dict[str, int]:
        form, metadata = self._form, self._file.metadata
        if not isinstance(metadata, dict):
            raise UnusableFileError(f"{form.path} has no metadata of ours")
        if {name: metadata.get(name) for name in form.labels} != form.labels:
            raise OutdatedFileError(f"{form.path} was made of other weights, or by another version")
        found = {name: StoredPart(tensor.dtype, tensor.shape) for name, tensor in self._file.tensors.items()}
        if found != form.parts:
            raise UnusableFileError(f"{form.path} has other tensors than this model")
        try:
            return {name: int(metadata[f"crc32 {name}"], 16) for name in form.parts}
        except (KeyError, TypeError, ValueError):
            raise UnusableFileError(f"{form.path} has no checksums") from None

    def read(
        self, linear: str, advance: Callable[[int], None]
    ) -> Int8Weight | Int4Weight | GroupedWeight | Float8Weight:
        """A new copy. Raises UnusableFileError."""
        inputs = self._form.parts[f"{linear}.values"].shape[1]
        form = self._form.quantization.form_of(linear, inputs)
        try:
            values, scales = self._part(f"{linear}.values", advance), self._part(f"{linear}.scales", advance)
            if isinstance(form, Float8Form):
                return Float8Weight(values, scales, None)
            if isinstance(form, GroupedForm):
                multipliers = torch.empty(len(values), 0, 1, dtype=torch.int8)
                return GroupedWeight(form, values, scales.float()[:, :, None], multipliers)
            if form.group_size is None:
                return Int8Weight(values, scales)
            return Int4Weight(values, scales.float(), self._part(f"{linear}.zeros", advance), form.group_size)
        except (OSError, ValueError) as error:
            raise UnusableFileError(f"{self._form.path}: {linear} cannot be read: {error}") from None

    def _part(self, name: str, advance: Callable[[int], None]) -> Tensor:
        stored = self._file.tensors[name]
        tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        self._file.copy(stored, tensor, advance)
        self._check_sum(name, tensor)
        return tensor

    def _check_sum(self, name: str, tensor: Tensor) -> None:
        if zlib.crc32(_bytes_of(tensor)) != self._checksums[name]:
            raise ValueError(f"the checksum of {name} does not match")

    @property
    def num_bytes(self) -> int:
        return self._form.num_bytes

    def remove(self) -> None:
        """Remove the damaged file, so that the next start does not find it."""
        with suppress(OSError):
            self._form.path.unlink()
        self.close()

    def close(self) -> None:
        self._file.close()


class CachedFileWriter:
    """Writes the file. Other processes see it only after `commit`; `discard` removes what was written."""

    def __init__(self, form: CachedForm) -> None:
        """Raises UnsafeDirectory, and OSError if it cannot be written: no space, no permission, or another process
        writes it."""
        check_directory(form.path.parent, Trust.READABLE)
        free_bytes = shutil.disk_usage(form.path.parent).free
        if free_bytes < form.num_bytes:
            raise OSError(errno.ENOSPC, f"{format_size(form.num_bytes)} are needed, {format_size(free_bytes)} are free")
        self._form = form
        self._partial = form.path.with_name(f"{form.path.name}.partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._partial, flags, 0o600), "r+b")
        try:
            # The lock keeps a second process from the file, and ends with its owner, whatever that dies of.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._file.fileno()).st_ino != self._partial.stat().st_ino:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process has just written it")
            self._file.truncate(0)
        except OSError:
            self._file.close()
            raise
        self._checksums: dict[str, int] = {}
        self._places: dict[str, int] = {}
        place = len(form.header({}))
        for name, part in form.parts.items():
            self._places[name] = place
            place += part.num_bytes

    def write(self, linear: str, weight: Int8Weight | Int4Weight | GroupedWeight | Float8Weight) -> None:
        """Write a weight; the order is free. Raises OSError; then call `discard`."""
        scales = weight.factors[:, :, 0].half() if isinstance(weight, GroupedWeight) else weight.scales
        parts = {"values": weight.values, "scales": scales}
        if isinstance(weight, Int4Weight):
            parts |= {"scales": weight.scales.half(), "zeros": weight.zeros}
        for part, tensor in parts.items():
            name = f"{linear}.{part}"
            data = _bytes_of(tensor)
            self._file.seek(self._places[name])
            self._file.write(data)
            self._checksums[name] = zlib.crc32(data)

    @property
    def is_complete(self) -> bool:
        """Whether all tensors are written."""
        return self._checksums.keys() == self._form.parts.keys()

    def commit(self) -> Path:
        """Give the complete file its header and its name. Raises OSError; then call `discard`."""
        self._file.seek(0)
        self._file.write(self._form.header(self._checksums))
        self._file.flush()
        self._partial.rename(self._form.path)
        self._file.close()
        return self._form.path

    def discard(self) -> None:
        with suppress(OSError):
            self._partial.unlink()
        with suppress(OSError):  # what is still to be written may not fit the disk
            self._file.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The content, not copied."""
    return tensor.contiguous().view(torch.uint8).view(-1).numpy().data
