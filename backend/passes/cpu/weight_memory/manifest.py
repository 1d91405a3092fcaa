"""The content of shared memory: a header, the weights, and at the end a manifest that describes how they are packed.

The memory is private to a server's processes, but damage to it must not become a wrong address: everything is checked
before it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec

from penstock.backend.passes.cpu.library.native_structs import MAX_WEIGHT_PARTS, PANEL, UNIT, Linear, Packing
from penstock.backend.passes.shared_weights import sealed_manifest
from penstock.backend.passes.shared_weights.blocks import SharedWeightsError, num_blocks

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PartForm(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `native_structs.WeightPart` that depend on the checkpoint's numbers or on their quantisation."""

    end_panel: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    bits: Literal[0, 2, 3, 4, 5, 6, 8]
    codebook: Annotated[int, msgspec.Meta(ge=0, le=2)]
    group_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    block_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    minima: Annotated[int, msgspec.Meta(ge=0, le=2)]

    def fits(self, inputs: int) -> bool:
        """Whether the kernels have this form for so many inputs."""
        if self.group_size == 0:
            return self.bits in (0, 8) and self.block_size == self.codebook == self.minima == 0
        is_unit = self.group_size in (16, 32, 64, 128, 256)  # what divides the part that kernels unpack at once
        is_block = self.block_size % UNIT == 0 and self.block_size >= self.group_size
        return (
            bool(self.bits)
            and is_unit
            and is_block
            and self.block_size % self.group_size == 0 == inputs % self.block_size
        )


class LinearForm(msgspec.Struct, frozen=True, array_like=True):
    """How a linear is packed."""

    parts: Annotated[tuple[PartForm, ...], msgspec.Meta(min_length=1, max_length=MAX_WEIGHT_PARTS)]
    scales_whole_rows: bool

    @classmethod
    def of(cls, linear: Linear) -> Self:
        parts = tuple(
            PartForm(part.end_panel, *(getattr(part.packing, name) for name, _ in Packing._fields_))
            for part in linear.parts[: linear.num_parts]
        )
        return cls(parts, bool(linear.scales_whole_rows))

    def give_to(self, linear: Linear) -> None:
        """Raises SharedWeightsError if the kernels do not have this form for a linear of this size."""
        panels = -(-linear.outputs // (PANEL >> linear.gated))
        ends = [0, *(part.end_panel for part in self.parts)]
        if ends != sorted(set(ends)) or ends[-1] != panels:
            raise SharedWeightsError(f"parts that end at panels {ends[1:]} in a linear of {panels}")
        for part, place in zip(self.parts, linear.parts, strict=False):
            if not part.fits(linear.inputs) or (part.bits == 0 and len(self.parts) > 1):
                raise SharedWeightsError(f"{part} in a linear of {linear.inputs} inputs")
            place.end_panel = part.end_panel
            place.packing = Packing(part.bits, part.codebook, part.group_size, part.block_size, part.minima)
        linear.num_parts, linear.scales_whole_rows = len(self.parts), self.scales_whole_rows


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
    """Return the bytes of weights, and the manifest. Raises SharedWeightsError."""
    data_bytes, manifest = sealed_manifest.read_manifest(fd, Manifest)
    _check(data_bytes, manifest)
    return data_bytes, manifest


def _check(data_bytes: int, manifest: Manifest) -> None:
    end = 0
    for number, weight in enumerate(manifest.weights):
        if weight.place < end or weight.place % 64 or weight.place + weight.num_bytes > data_bytes:
            raise SharedWeightsError(
                f"weight {number} of {weight.num_bytes} bytes at {weight.place} does not lie behind {end} within "
                f"{data_bytes} bytes"
            )
        end = weight.place + weight.num_bytes
    if data_bytes % 64 or len(manifest.block_sums) != num_blocks(data_bytes):
        raise SharedWeightsError(f"{len(manifest.block_sums)} checksums for {data_bytes} bytes")
