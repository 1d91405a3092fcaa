"""The content of held memory: a header, the weights, and at the end a manifest that describes how they are packed.

The memory is private to a server's processes, but damage to it must not become a wrong address: everything is checked
before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec

from penstock.backend.passes.decoder.cpu.native_structs import WeightForm
from penstock.backend.passes.decoder.held_weights import sealed_manifest
from penstock.backend.passes.decoder.held_weights.blocks import HeldWeightsError, num_blocks

if TYPE_CHECKING:
    from penstock.backend.passes.decoder.cpu.native_structs import Linear

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LinearForm(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `native_structs.Linear` that depend on the checkpoint's numbers or on their quantisation."""

    form: Annotated[int, msgspec.Meta(ge=0, le=4)] = 0
    group_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    int4_kind: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    block_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    has_minima: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0

    @classmethod
    def of(cls, linear: Linear) -> Self:
        return cls(linear.form, linear.group_size, linear.int4_kind, linear.block_size, linear.has_minima)

    def give_to(self, linear: Linear) -> None:
        """Raises HeldWeightsError if the kernels do not have this form for a linear of this size."""
        groups = {WeightForm.INT4: (self.group_size,), WeightForm.GROUPED4: (self.group_size, self.block_size)}
        groups[WeightForm.GROUPED8] = groups[WeightForm.GROUPED4]
        for size in groups.get(WeightForm(self.form), ()):
            if size == 0 or linear.inputs % size:
                raise HeldWeightsError(f"groups of {size} in a linear of {linear.inputs} inputs")
        linear.form, linear.group_size, linear.int4_kind = self.form, self.group_size, self.int4_kind
        linear.block_size, linear.has_minima = self.block_size, self.has_minima


class PackedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A packed weight. Weights are in the order in which they are packed."""

    place: Size
    num_bytes: Size
    form: LinearForm | None
    """None if it is not a linear."""


class Manifest(msgspec.Struct, frozen=True):
    fingerprint: str
    dtype: Literal["bf16", "fp32"]
    weights: tuple[PackedWeight, ...]
    block_sums: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...]


def read_manifest(fd: int) -> tuple[int, Manifest]:
    """Return the bytes of weights, and the manifest. Raises HeldWeightsError."""
    data_bytes, manifest = sealed_manifest.read_manifest(fd, Manifest)
    _check(data_bytes, manifest)
    return data_bytes, manifest


def _check(data_bytes: int, manifest: Manifest) -> None:
    end = 0
    for number, weight in enumerate(manifest.weights):
        if weight.place < end or weight.place % 64 or weight.place + weight.num_bytes > data_bytes:
            raise HeldWeightsError(
                f"weight {number} of {weight.num_bytes} bytes at {weight.place} does not lie behind {end} within "
                f"{data_bytes} bytes"
            )
        end = weight.place + weight.num_bytes
    if data_bytes % 64 or len(manifest.block_sums) != num_blocks(data_bytes):
        raise HeldWeightsError(f"{len(manifest.block_sums)} checksums for {data_bytes} bytes")
