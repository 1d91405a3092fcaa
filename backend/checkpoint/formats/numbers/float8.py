"""8-bit floats with a scale for each block of the matrix: DeepSeek's and Qwen's fp8, and compressed-tensors'."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backend.checkpoint.formats.matrix_format import (
    FLOATS,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
)
from penstock.backend.checkpoint.weight_forms.float8_weight import FLOAT8_GROUP_SIZE, Float8Form, Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_weights import MAX_QUANTIZED_INPUTS
from penstock.backend.lazy_torch import Tensor, torch

SCALES = (*FLOATS, "F8_E8M0")
"""E8M0 holds powers of two only."""


@dataclass(frozen=True)
class Float8(MatrixFormat):
    """w = scale × value: E4M3 (finite, with NaN). Only GPU kernels multiply it."""

    method: str
    block: tuple[int, int] | None
    """(outputs, inputs) that share a scale; blocks at the end may be smaller. None: one scale, or one per output."""
    scale_names: tuple[str, ...]
    """Names that the scales' tensor may have."""
    per_output: bool = False
    """Without blocks: a scale for each output."""

    @property
    def description(self) -> str:
        if self.block is not None:
            return f"{self.method}, E4M3, blocks of {self.block[0]} × {self.block[1]}"
        return f"{self.method}, E4M3, one scale per {'output' if self.per_output else 'matrix'}"

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        if self.block is not None:
            scales: tuple[tuple[int, ...], ...] = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        elif self.per_output:
            scales = ((outputs, 1), (outputs,))
        else:
            scales = ((1,), (), (1, 1))
        parts = {name: Part(scales, SCALES, optional=len(self.scale_names) > 1) for name in self.scale_names}
        return {"weight": Part((shape,), ("F8_E4M3",)), **parts}

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - the parts have it
        found = [name for name in self.scale_names if name in parts]
        if len(found) != 1:
            raise UnreadableMatrixError(f"it has {' and '.join(found) or 'no scales'}, not one of {self.scale_names}")

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        values, scales = parts["weight"][rows].float(), self._scales(parts).float()
        if self.block is not None:
            blocks = torch.arange(rows.start, rows.stop) // self.block[0]
            return values.mul_(scales[blocks].repeat_interleave(self.block[1], dim=1)[:, : shape[1]])
        return values.mul_(scales.view(-1, 1)[rows] if self.per_output else scales.view(1, 1))

    def packed_form(self, shape: Shape) -> Float8Form | None:
        if shape[1] > MAX_QUANTIZED_INPUTS:
            return None
        if self.block is None:
            return Float8Form(None)
        return Float8Form(FLOAT8_GROUP_SIZE) if self.block[1] == FLOAT8_GROUP_SIZE else None

    def pack(self, parts: Parts, shape: Shape) -> Float8Weight | None:
        form, scales = self.packed_form(shape), self._scales(parts).float()
        if form is None or not bool(scales.isfinite().all()):
            return None
        if self.block is not None:
            scales = scales[torch.arange(shape[0]) // self.block[0]]
        else:
            scales = scales.view(-1, 1).expand(shape[0], 1).contiguous()
        return Float8Weight(parts["weight"].view(torch.uint8), scales, form.group_size)

    def _scales(self, parts: Parts) -> Tensor:
        return next(parts[name] for name in self.scale_names if name in parts)
