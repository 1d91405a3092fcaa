"""The dtypes in which models are computed, for code that runs with and without torch."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backend.lazy_torch import torch

_ALIGNMENT = 64


class Dtype(Enum):
    """The value is the name in options and messages."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def of(cls, dtype: torch.dtype) -> Dtype:
        return next(own for own in cls if own.in_torch is dtype)

    @property
    def in_torch(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]

    @property
    def in_numpy(self) -> np.dtype[Any]:
        """numpy has no bf16: its bits."""
        return np.dtype({"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}[self.value])

    @property
    def itemsize(self) -> int:
        return 4 if self is Dtype.FP32 else 2

    def round(self, number: float) -> float:
        """The nearest number of this dtype; between two, the even one."""
        if self is not Dtype.BF16:
            return float(self.in_numpy.type(number))
        (bits,) = np.array([number], np.float32).view(np.uint32).tolist()
        high = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        return float(widen_bf16(np.array([high], np.uint16))[0])


def empty_array(shape: tuple[int, ...], dtype: Dtype) -> NDArray[Any]:
    """Like numpy's, which begin at multiples of 16 bytes; this one at one of 64, for whole vectors."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype.in_numpy).reshape(shape)


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """A copy in fp32 of numbers in bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
