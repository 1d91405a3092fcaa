"""4-bit floats: bitsandbytes' nf4 and fp4, with a table of 16 values, and MXFP4, whose scales are powers of two."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.backend.checkpoint.formats.matrix_format import (
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
    check_multiple,
)
from penstock.backend.checkpoint.json_file import shorten

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64
"""Numbers that share a scale in bitsandbytes' 4-bit formats."""
_NESTED_BLOCK = 256
"""Scales that share one of their own."""
_STATE = "weight.quant_state.bitsandbytes__"

_MX_BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_E8M0_NAN = 255


@dataclass(frozen=True)
class Bitsandbytes4Bit(MatrixFormat):
    """w = table[value] × scale of its block of 64 consecutive numbers. Of each byte the high 4 bits come first."""

    type_name: str
    """"nf4" or "fp4"."""
    nested: bool
    """Scales are themselves 8-bit numbers: table[value] × scale of 256 of them + offset."""

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
        """What bitsandbytes notes about the matrix: JSON as bytes."""
        try:
            state = json.loads(bytes(parts[f"{_STATE}{self.type_name}"].tolist()))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise UnreadableMatrixError("its quant_state is not a JSON object")
        return state


@dataclass(frozen=True)
class Mxfp4(MatrixFormat):
    """w = value × 2^exponent: E2M1 values in blocks of 32 inputs. Of each byte the low 4 bits come first."""

    @property
    def description(self) -> str:
        return "compressed-tensors, MXFP4"

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        check_multiple("inputs", inputs, _MX_BLOCK, "the numbers in a block")
        return {
            "weight_packed": Part(((outputs, inputs // 2),), ("U8",)),
            "weight_scale": Part(((outputs, inputs // _MX_BLOCK),), ("U8",)),
        }

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - the parts have it
        if bool((parts["weight_scale"] == _E8M0_NAN).any()):
            raise UnreadableMatrixError("weight_scale has 255, which is not a number")

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        content = parts["weight_packed"][rows]
        table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
        values = table[torch.stack([content & 15, content >> 4], dim=-1).view(-1, _MX_BLOCK).long()]
        exponents = parts["weight_scale"][rows].reshape(-1, 1).int() - _E8M0_BIAS
        return torch.ldexp(values, exponents).view(-1, shape[1])
