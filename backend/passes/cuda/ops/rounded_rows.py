"""Products of many rows with 8-bit weights whose checkpoint declares activations of 8 bits: the rows get 8 bits too.

The library multiplies: `torch._int_mm` integers, `torch._scaled_mm` E4M3. Every row is rounded by its own largest
magnitude, so its numbers are the same in any batch. Rows have the weights' order of inputs within a chunk, so the
library reads the weights as they lie for our kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form
from penstock.backend.checkpoint.weight_forms.quantized_forms import PackedForm
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear, KernelForm, chunk_inputs

ROUNDED_FORMS: tuple[PackedForm | Float8Form, ...] = (PackedForm(None), Float8Form(None))
FLOAT8_CAPABILITY = (8, 9)
"""The first GPUs with products of E4M3."""
_OUTPUTS_MULTIPLE = 16
"""A condition of the library."""
_SUM_BYTES = 4
_VALUES = 8


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for dtype in (torch.bfloat16, torch.float16):
        for form in ROUNDED_FORMS:
            yield from rounding_kernels(form, dtype)


def rounding_kernels(form: KernelForm, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Return round_rows, and scale_sums if the form needs it."""
    is_float = isinstance(form, Float8Form)
    macros = (("ACT", ACT_MACRO[dtype]), ("E4M3", int(is_float)))
    entries = ("round_rows",) if is_float else ("round_rows", "scale_sums")
    return tuple(Kernel("products/rounded_rows.cu", entry, macros, 128) for entry in entries)


def row_bytes(max_inputs: int) -> int:
    """Memory of a row of 8-bit numbers and its scale."""
    return _filled(max_inputs) + 4


class RoundedProducts:
    """dtype is that of the activations. No product allocates memory of ours."""

    def __init__(
        self,
        launcher: Launcher,
        torch_device: torch.device,
        dtype: torch.dtype,
        max_tokens: int,
        max_inputs: int,
        capability: tuple[int, int],
        min_rows: int,
    ) -> None:
        """min_rows: see `KernelChoices.rounded_rows`."""
        self._launcher = launcher
        self._torch_device = torch_device
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._max_inputs = max_inputs
        self._min_rows = min_rows
        self._has_float8 = capability >= FLOAT8_CAPABILITY and dtype is torch.bfloat16
        self._kernels: dict[KernelForm, tuple[Kernel, ...]] = {}

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels for all forms that were opened."""
        for kernels in self._kernels.values():
            yield from kernels

    def open(self, form: KernelForm) -> None:
        """Allow products with weights of the form, if it supports them. The first such form takes the memory of
        `row_bytes`."""
        if form not in ROUNDED_FORMS or (isinstance(form, Float8Form) and not self._has_float8):
            return
        if not self._kernels:
            size = self._max_tokens * _filled(self._max_inputs)
            self._rows = torch.empty(size, dtype=torch.uint8, device=self._torch_device)
            self._scales = torch.empty(self._max_tokens, 1, device=self._torch_device)
        self._kernels[form] = rounding_kernels(form, self._dtype)

    def takes(self, weights: CudaQuantizedLinear, num_rows: int, scratch: Tensor) -> bool:
        """Whether `multiply` serves the product. The contents of the rows do not matter."""
        if num_rows < self._min_rows or weights.form not in self._kernels or weights.shape[0] % _OUTPUTS_MULTIPLE:
            return False
        if isinstance(weights.form, Float8Form):
            return weights.scale == 1.0  # the library has no other one
        return num_rows * _OUTPUTS_MULTIPLE * _SUM_BYTES <= scratch.nbytes

    def multiply(self, x: Tensor, weights: CudaQuantizedLinear, out: Tensor, scratch: Tensor) -> Tensor:
        """As `QuantizedProducts.multiply`. scratch: memory for sums."""
        num_rows, inputs = x.shape
        width = weights.values.shape[1]
        rows, scales = self._rows[: num_rows * width].view(num_rows, width), self._scales[:num_rows]
        launch, (round_rows, *others) = self._launcher.launch, self._kernels[weights.form]
        launch(round_rows, (num_rows, 1, 1), x, rows, scales, np.int32(inputs), np.int32(width))
        if isinstance(weights.form, Float8Form):
            torch._scaled_mm(
                rows.view(torch.float8_e4m3fn), weights.values.view(torch.float8_e4m3fn).t(), scales,
                weights.scales.view(1, -1), bias=weights.bias, out_dtype=self._dtype, out=out,
            )  # fmt: skip
            return out
        sums, (scale_sums,) = scratch.view(torch.int32), others
        step = len(sums) // num_rows // _OUTPUTS_MULTIPLE * _OUTPUTS_MULTIPLE
        outputs, bias = weights.shape[0], x if weights.bias is None else weights.bias
        for first in range(0, outputs, step):
            count = min(step, outputs - first)
            part = sums[: num_rows * count].view(num_rows, count)
            values = weights.values[first : first + count].view(torch.int8)
            torch._int_mm(rows.view(torch.int8), values.t(), out=part)
            grid = (num_rows, -(-count // (_VALUES * scale_sums.num_threads)), 1)
            launch(
                scale_sums, grid, part, scales, weights.scales, bias, out,
                *map(np.int32, (first, count, outputs, weights.bias is not None)), np.float32(weights.scale),
            )  # fmt: skip
        return out


def _filled(inputs: int) -> int:
    chunk = chunk_inputs(PackedForm(None))
    return -(-inputs // chunk) * chunk
