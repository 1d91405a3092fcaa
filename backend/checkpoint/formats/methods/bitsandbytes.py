"""The formats of bitsandbytes: nf4 and fp4, which have a table of 16 values, and LLM.int8()."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.formats.matrix_format import (
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
    check_multiple,
)
from penstock.backend.lazy_torch import Tensor, torch

_BLOCK = 64
"""Numbers that share a scale in the 4-bit formats."""
_NESTED_BLOCK = 256
"""Scales that share one scale."""
_STATE = "weight.quant_state.bitsandbytes__"
_INT8_STEP = 7.874015718698502e-3
"""1 / 127, rounded as in bitsandbytes."""


@dataclass(frozen=True)
class Bitsandbytes4Bit(MatrixFormat):
    """w = table[value] × the scale of its block of 64 consecutive numbers. The high 4 bits of a byte come first."""

    type_name: str
    """"nf4" or "fp4"."""
    nested: bool
    """Scales are 8-bit numbers themselves: table[value] × the scale of 256 of them + offset."""

    @property
    def description(self) -> str:
        return f"bitsandbytes, {self.type_name}" + (", nested scales" if self.nested else "")

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        check_multiple("inputs", inputs, 2, "the numbers in a byte")
        blocks = -(-outputs * inputs // _BLOCK)
        parts = {
            "weight": Part(((outputs * inputs // 2, 1), (1, outputs * inputs // 2)), ("U8",)),
            "weight.absmax": Part(((blocks,),), ("U8",) if self.nested else ("F32",)),
            "weight.quant_map": Part(((16,),), ("F32",)),
            f"{_STATE}{self.type_name}": Part((), ("U8",)),
        }
        if self.nested:
            parts["weight.nested_absmax"] = Part(((-(-blocks // _NESTED_BLOCK),),), ("F32",))
            parts["weight.nested_quant_map"] = Part(((256,),), ("F32",))
        return parts

    def check(self, parts: Parts, shape: Shape) -> None:
        state = self._state(parts)
        expected: dict[str, object] = {"blocksize": _BLOCK, "shape": list(shape), "quant_type": self.type_name}
        if self.nested:
            expected["nested_blocksize"] = _NESTED_BLOCK
            offset = state.get("nested_offset")
            if not isinstance(offset, float) or not math.isfinite(offset):
                raise UnreadableMatrixError(f"nested_offset is {shorten(offset)}; it must be a finite number")
        for key, value in expected.items():
            if state.get(key) != value:
                raise UnreadableMatrixError(f"{key} is {shorten(state.get(key))}; it must be {value}")

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        inputs = shape[1]
        first, end = rows.start * inputs, rows.stop * inputs
        content = parts["weight"].view(-1)[first // 2 : end // 2]
        values = torch.stack([content >> 4, content & 15], dim=-1).view(-1)
        blocks = torch.arange(first, end) // _BLOCK
        scales = self._scales(parts, int(blocks[0]), int(blocks[-1]) + 1)
        numbers = parts["weight.quant_map"][values.long()]
        return numbers.mul_(scales[blocks - blocks[0]]).view(-1, inputs)

    def _scales(self, parts: Parts, first: int, end: int) -> Tensor:
        """float32, of some blocks."""
        scales = parts["weight.absmax"][first:end]
        if not self.nested:
            return scales
        groups = torch.arange(first, end) // _NESTED_BLOCK
        numbers = parts["weight.nested_quant_map"][scales.long()] * parts["weight.nested_absmax"][groups]
        return numbers.add_(self._state(parts)["nested_offset"])

    def _state(self, parts: Parts) -> dict[str, Any]:
        """Decode bitsandbytes' note about the matrix: JSON as bytes."""
        try:
            state = json.loads(bytes(parts[f"{_STATE}{self.type_name}"].tolist()))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise UnreadableMatrixError("its quant_state is not a JSON object")
        return state


@dataclass(frozen=True)
class BitsandbytesInt8(MatrixFormat):
    """w = value × largest magnitude of its output / 127: LLM.int8().

    No kernel multiplies it: LLM.int8()'s own product computes unusually large activations separately.
    """

    @property
    def description(self) -> str:
        return "bitsandbytes, LLM.int8"

    def parts(self, shape: Shape) -> dict[str, Part]:
        return {
            "weight": Part((shape,), ("I8",)),
            "SCB": Part(((shape[0],),), ("F32",)),
            "weight_format": Part(((), (1,)), ("U8",), optional=True),
        }

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - the parts have it
        if "weight_format" in parts and int(parts["weight_format"]) != 0:
            raise UnreadableMatrixError(f"weight_format is {int(parts['weight_format'])}; it must be 0, by rows")

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:  # noqa: ARG002 - the parts have it
        return parts["weight"][rows].float().mul_(parts["SCB"][rows, None]).mul_(_INT8_STEP)
