"""The content of blocks of a GPU's memory: read from a sealed memfd, and checked before it becomes an address."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, Self

import msgspec
import torch

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm, WeightForm
from penstock.backend.passes.shared_weights import sealed_manifest
from penstock.backend.passes.shared_weights.blocks import SharedWeightsError, num_blocks

ALIGNMENT = 512
"""The alignment of each tensor, as in torch's own allocations."""
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "uint8": torch.uint8, "int8": torch.int8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FORMS: dict[str, Any] = {"packed": PackedForm, "grouped": GroupedForm, "float8": Float8Form}

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
DtypeName = Literal["bf16", "fp16", "fp32", "uint8", "int8"]


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    place: Size
    dtype: DtypeName
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=4)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class SharedForm(msgspec.Struct, frozen=True, array_like=True):
    """A `WeightForm`."""

    kind: Literal["packed", "grouped", "float8"]
    fields: dict[str, int | bool | str | None]

    @classmethod
    def of(cls, form: WeightForm) -> Self:
        kind = next(kind for kind, known in _FORMS.items() if isinstance(form, known))
        return cls(kind, dataclasses.asdict(form))  # type: ignore[arg-type]

    def read(self) -> WeightForm:
        """Raises SharedWeightsError."""
        try:
            form: WeightForm = msgspec.convert(self.fields, _FORMS[self.kind])
        except msgspec.ValidationError as error:
            raise SharedWeightsError(f"a form of kind {self.kind}: {error}") from None
        return form


class SharedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A shared weight. Weights are in the order in which they are packed."""

    tensors: Annotated[tuple[SharedTensor, ...], msgspec.Meta(min_length=1, max_length=3)]
    form: SharedForm | None
    """None if it is not quantised; then it has one tensor."""


class DeviceManifest(msgspec.Struct, frozen=True):
    fingerprint: str
    dtype: DtypeName
    """dtype of the weights that are not quantised."""
    data_bytes: Size
    block_bytes: tuple[Size, ...]
    """The size of each block of device memory, in order."""
    weights: tuple[SharedWeight, ...]
    sums: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...]


def dtype_name(dtype: torch.dtype) -> DtypeName:
    return _NAMES[dtype]  # type: ignore[return-value]


def read_manifest(fd: int, num_fds: int) -> DeviceManifest:
    """Return the manifest, which must have num_fds blocks. Raises SharedWeightsError."""
    _, manifest = sealed_manifest.read_manifest(fd, DeviceManifest)
    if len(manifest.block_bytes) != num_fds or manifest.data_bytes > sum(manifest.block_bytes):
        raise SharedWeightsError(
            f"{num_fds} blocks are shared; the manifest has {len(manifest.block_bytes)} of {sum(manifest.block_bytes)} "
            f"bytes for {manifest.data_bytes} bytes of weights"
        )
    end = 0
    for tensor in (tensor for weight in manifest.weights for tensor in weight.tensors):
        if tensor.place < end or tensor.place % ALIGNMENT or tensor.place + tensor.num_bytes > manifest.data_bytes:
            raise SharedWeightsError(
                f"a tensor of {tensor.num_bytes} bytes at {tensor.place} does not lie behind {end} within "
                f"{manifest.data_bytes} bytes"
            )
        end = tensor.place + tensor.num_bytes
    if manifest.data_bytes % ALIGNMENT or len(manifest.sums) != num_blocks(manifest.data_bytes):
        raise SharedWeightsError(f"{len(manifest.sums)} checksums for {manifest.data_bytes} bytes")
    return manifest
