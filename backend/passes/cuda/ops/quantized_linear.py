"""Linears with quantised weights on the device, of 8 or 4 bits, integers or floats: the kernels that read them.

Activations stay 16-bit floats (w8a16, w4a16). For up to `Matmul.kernel_rows` rows our kernel multiplies, and widens the
weights in registers; for more, blocks of weights are widened in memory, and the library multiplies. Where a checkpoint
declares activations of 8 bits, many rows get such numbers: see `rounded_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.float8_weight import FLOAT8_GROUP_SIZE, Float8Form
from penstock.backend.checkpoint.weight_forms.quantized_forms import GROUP_SIZES, GroupedForm, PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import INT4_GROUP_SIZES, QuantizedWeight
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher
from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory, PrivateMemory
from penstock.backend.passes.cuda.ops.matmul import CudaLinear, Matmul, multiply
from penstock.backend.passes.cuda.ops.packed_weights import (
    MXFP4_FORM,
    CudaQuantizedLinear,
    KernelForm,
    as_linear,
    distinct_parts,
    pack_weight,
    takes_packed,
    value_bits,
)
from penstock.backend.passes.cuda.ops.rounded_rows import RoundedProducts
from penstock.backend.passes.cuda.step.step_rows import RowArrays

TILE_ROWS, TILE_OUTPUTS = 64, 32
"""kTileRows and kTileOutputs of product_tiles.cuh."""
SCRATCH_BYTES = 64 << 20
"""Weights that are widened in memory at a time.

A product reads them again, and most of them stay in an H200's L2 cache (computed, not measured).
"""
_FORMS: tuple[KernelForm, ...] = (
    PackedForm(None),
    *map(PackedForm, INT4_GROUP_SIZES),
    MXFP4_FORM,
    Float8Form(None),
    Float8Form(FLOAT8_GROUP_SIZE),
    *(GroupedForm(bits, GROUP_SIZES[0], GROUP_SIZES[0], has_minima=False) for bits in (4, 8)),
)
"""One form for each set of kernels: those of `GroupedForm` depend only on its bits."""
_VALUES = 8


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for dtype in (torch.bfloat16, torch.float16):
        for form in _FORMS:
            yield from quantized_kernels(form, dtype)


def quantized_kernels(form: KernelForm, dtype: torch.dtype) -> tuple[Kernel, Kernel, Kernel]:
    """Return multiply_quantised, dequantise_rows and embed_quantised."""
    macros = (("ACT", ACT_MACRO[dtype]), *form_macros(form))
    entries = ("multiply_quantised", "dequantise_rows", "embed_quantised")
    multiply, dequantise, embed = (Kernel("products/quantised_products.cu", entry, macros, 128) for entry in entries)
    return multiply, dequantise, embed


def form_macros(form: KernelForm) -> tuple[tuple[str, int], ...]:
    """Return the macros of kernels/products/quantised_weights.cuh, without ACT."""
    is_float, has_blocks = isinstance(form, Float8Form) or form == MXFP4_FORM, isinstance(form, GroupedForm)
    return (
        ("WEIGHT", value_bits(form)), ("FLOAT", int(is_float)),
        ("GROUP", 0 if has_blocks else form.group_size or 0), ("BLOCKS", int(has_blocks)),
    )  # fmt: skip


def scratch_bytes(max_tokens: int, matmul: Matmul, rounds_rows: bool) -> int:
    """Memory that a model with packed linears needs in addition to them."""
    return SCRATCH_BYTES * _needs_scratch(max_tokens, matmul, rounds_rows) + 4 * (max_tokens + 1)


def _needs_scratch(max_tokens: int, matmul: Matmul, rounds_rows: bool) -> bool:
    """For widened weights, or for sums of rounded rows."""
    return max_tokens > matmul.kernel_rows or rounds_rows


def num_launches(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Return the kernels of a product with widened weights [outputs, inputs] and activations of dtype."""
    outputs, inputs = shape
    return 2 * -(-outputs // _widened_outputs(inputs, dtype))


def _widened_outputs(inputs: int, dtype: torch.dtype) -> int:
    """Return the outputs whose weights are widened at a time."""
    return SCRATCH_BYTES // dtype.itemsize // inputs // TILE_OUTPUTS * TILE_OUTPUTS


class QuantizedProducts:
    """Packs such linears on one device, and launches their kernels. dtype is the activations'."""

    def __init__(
        self,
        launcher: Launcher,
        torch_device: torch.device,
        dtype: torch.dtype,
        max_tokens: int,
        matmul: Matmul,
        rounded: RoundedProducts | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """rounded: products of the rows that get 8 bits, if any may. memory:
        where `take` packs to; by default this process's own."""
        self._memory = memory or PrivateMemory()
        self._launcher = launcher
        self._torch_device = torch_device
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._kernel_rows = matmul.kernel_rows
        self._needs_scratch = _needs_scratch(max_tokens, matmul, rounded is not None)
        self._rounded = rounded
        self._kernels: dict[KernelForm, tuple[Kernel, Kernel, Kernel]] = {}

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels for all that was packed."""
        for kernels in self._kernels.values():
            yield from kernels
        if self._rounded is not None:
            yield from self._rounded.kernels()

    def take(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> CudaQuantizedLinear | None:
        """Pack the weight into its place in memory, or find it there. Return None if it is not packed."""
        if self._memory.is_filled:
            found = self._memory.find_parts()
            if found is None:
                return None
            packed = as_linear(*found, (weight.shape[0], weight.shape[1]), self._dtype)
            return self._open(replace(packed, bias=bias, scale=scale, is_gated=is_gated))
        if isinstance(weight, torch.Tensor) or not takes_packed(self._dtype):
            return None
        packed = pack_weight(weight, self._torch_device, bias, scale, is_gated=is_gated)
        parts = self._memory.place_parts(packed.form, distinct_parts(packed))
        return self._open(replace(packed, values=parts[0], scales=parts[1], zeros=parts[-1]))

    def pack(
        self, weight: QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> CudaQuantizedLinear:
        """Pack without a place in memory; see `pack_weight`."""
        return self._open(pack_weight(weight, self._torch_device, bias, scale, is_gated=is_gated))

    def _open(self, packed: CudaQuantizedLinear) -> CudaQuantizedLinear:
        if not self._kernels:
            self._allocate()
        if packed.form not in self._kernels:
            self._kernels[packed.form] = quantized_kernels(packed.form, self._dtype)
            if self._rounded is not None:
                self._rounded.open(packed.form)
        return packed

    def _allocate(self) -> None:
        """Allocate the memory of `scratch_bytes`; a model without such linears needs none."""
        device, num_values = self._torch_device, SCRATCH_BYTES // self._dtype.itemsize
        if self._needs_scratch:
            self._scratch = torch.empty(num_values, dtype=self._dtype, device=device)
        self._numbers = torch.arange(self._max_tokens + 1, dtype=torch.int32, device=device)

    def multiply(self, x: Tensor, weights: CudaQuantizedLinear, out: Tensor) -> Tensor:
        """Write (x [T, in] · weights + bias) × scale to out [T, out]; return out."""
        if self._rounded is not None and self._rounded.takes(weights, len(x), self._scratch):
            return self._rounded.multiply(x, weights, out, self._scratch)
        if len(x) > self._kernel_rows:
            return self._multiply_widened(x, weights, out)
        all_rows = self._numbers[len(x) : len(x) + 1]
        self.multiply_experts(x, weights, 1, all_rows, all_rows, out, gathers=False)
        return out

    def multiply_experts(
        self,
        x: Tensor,
        weights: CudaQuantizedLinear,
        num_experts: int,
        tokens: Tensor,
        ends: Tensor,
        out: Tensor,
        *,
        gathers: bool,
    ) -> None:
        """As multiply_experts in kernels/products/expert_products.cu; weights [num_experts * outputs, inputs]."""
        rows, inputs = weights.shape
        outputs = rows // num_experts
        bias = x if weights.bias is None else weights.bias
        grid = (-(-outputs // TILE_OUTPUTS), most_tiles(len(out), num_experts), 1)
        self._launcher.launch(
            self._kernels[weights.form][0], grid, x, tokens, *weights.parts, bias, ends,
            out, *map(np.int32, (num_experts, outputs, inputs, gathers, weights.bias is not None)),
            np.float32(weights.scale), np.int32(weights.blocks),
        )  # fmt: skip

    def embed(
        self, table: CudaQuantizedLinear, input_ids: Tensor, rows: RowArrays, last_tokens: Tensor, residual: Tensor,
        scale: float,
    ) -> None:  # fmt: skip
        """As `Elementwise.embed`."""
        vocab_size, hidden = table.shape
        kernel = self._kernels[table.form][2]
        grid = (len(residual), -(-hidden // (_VALUES * kernel.num_threads)), 1)
        self._launcher.launch(
            kernel, grid, *table.parts, input_ids, last_tokens, rows.query_starts, rows.slots, residual,
            *map(np.int32, (len(rows.slots), vocab_size, hidden)), np.float32(scale), np.int32(table.blocks),
        )  # fmt: skip

    def _multiply_widened(self, x: Tensor, weights: CudaQuantizedLinear, out: Tensor) -> Tensor:
        outputs, inputs = weights.shape
        kernel = self._kernels[weights.form][1]
        step = _widened_outputs(inputs, self._dtype)
        for first in range(0, outputs, step):
            count = min(step, outputs - first)
            widened = self._scratch[: count * inputs].view(count, inputs)
            grid = (count, -(-inputs // (_VALUES * kernel.num_threads)), 1)
            sizes = map(np.int32, (first, inputs, weights.blocks))
            self._launcher.launch(kernel, grid, *weights.parts, widened, *sizes)
            bias = None if weights.bias is None else weights.bias[first : first + count]
            part = CudaLinear(widened, widened.t(), bias, weights.scale)
            multiply(x, part, out[:, first : first + count])
        return out


def most_tiles(num_pairs: int, num_experts: int) -> int:
    """Return the most tiles of rows, each with the rows of one expert."""
    return num_pairs // TILE_ROWS + min(num_experts, num_pairs)
