"""Linears with weights of 8 or 4 bits on the device, integers or E4M3: their memory, and the kernels that read it.

Activations stay 16-bit floats (w8a16, w4a16). For up to `Matmul.kernel_rows` rows our kernel multiplies, and widens the
weights in registers; for more, blocks of weights are widened in memory, and the library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from penstock.backend.checkpoint.float8_weight import FLOAT8_GROUP_SIZE, Float8Form
from penstock.backend.checkpoint.quantized_weights import INT4_GROUP_SIZES, GroupedForm, PackedForm
from penstock.backend.passes.decoder.cuda.device.launcher import ACT_MACRO, Kernel
from penstock.backend.passes.decoder.cuda.ops.matmul import CudaLinear, Matmul, WholeMatmul

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight, WeightForm
    from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
    from penstock.backend.passes.decoder.cuda.step.step_rows import RowArrays

KernelForm: TypeAlias = PackedForm | Float8Form
TILE_ROWS, TILE_OUTPUTS = 64, 32
"""kTileRows and kTileOutputs of product_tiles.cuh."""
SCRATCH_BYTES = 64 << 20
"""Weights that are widened in memory at a time: what a product reads again stays in an H200's L2 cache for the most
part (computed, not measured)."""
_FORMS: tuple[KernelForm, ...] = (
    PackedForm(None),
    *map(PackedForm, INT4_GROUP_SIZES),
    Float8Form(None),
    Float8Form(FLOAT8_GROUP_SIZE),
)
_CHUNK_BYTES = 64
"""Bytes of one output's values that lie together; see kernels/quantised_weights.cuh."""
_VALUES = 8


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for dtype in (torch.bfloat16, torch.float16):
        for form in _FORMS:
            yield from quantized_kernels(form, dtype)


def quantized_kernels(form: KernelForm, dtype: torch.dtype) -> tuple[Kernel, Kernel, Kernel]:
    """Return multiply_quantised, dequantise_rows and embed_quantised."""
    kinds = ("WEIGHT", 4 if _is_int4(form) else 8), ("E4M3", int(isinstance(form, Float8Form)))
    macros = (("ACT", ACT_MACRO[dtype]), *kinds, ("GROUP", form.group_size or 0))
    entries = ("multiply_quantised", "dequantise_rows", "embed_quantised")
    multiply, dequantise, embed = (Kernel("quantised_products.cu", entry, macros, 128) for entry in entries)
    return multiply, dequantise, embed


def packed_bytes(form: WeightForm, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Memory of a linear [outputs, inputs] on the device, as `PackedForm.num_bytes`, with the last chunks filled up."""
    outputs, inputs = shape
    if isinstance(form, GroupedForm) or not takes_packed(dtype):
        return outputs * inputs * dtype.itemsize
    return form.num_bytes((outputs, -(-inputs // _chunk_inputs(form)) * _chunk_inputs(form)))


def has_kernels(form: WeightForm) -> bool:
    """Whether linears that are stored in the form stay in it. Others are dequantised when they are read."""
    return form in _FORMS


def takes_packed(dtype: torch.dtype) -> bool:
    """Whether weights stay packed beside activations of dtype. Beside fp32 they are dequantised."""
    return dtype is not torch.float32


def scratch_bytes(max_tokens: int, matmul: Matmul) -> int:
    """Memory that a model with packed linears needs beside them."""
    widened = SCRATCH_BYTES if max_tokens > matmul.kernel_rows else 0
    return widened + 4 * (max_tokens + 1)


@dataclass(frozen=True, slots=True)
class CudaQuantizedLinear:
    """The layout is that of kernels/quantised_weights.cuh. Its fields after zeros are as in `CudaLinear`."""

    form: KernelForm
    shape: tuple[int, int]
    """(outputs, inputs)"""
    values: Tensor
    """uint8 [outputs, bytes]"""
    scales: Tensor
    """4 bits: fp16 [outputs, groups]; 8 bits: fp32, one per output or [outputs, groups]."""
    zeros: Tensor
    """4 bits: uint8 [outputs, groups]; 8 bits: any tensor, which is not read."""
    bias: Tensor | None
    scale: float = 1.0
    is_gated: bool = False

    @property
    def num_outputs(self) -> int:
        return self.shape[0]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.scales, self.zeros


class QuantizedProducts:
    """Packs such linears on one device, and launches their kernels. dtype is that of the activations."""

    def __init__(
        self, launcher: Launcher, torch_device: torch.device, dtype: torch.dtype, max_tokens: int, matmul: Matmul
    ) -> None:
        self._launcher = launcher
        self._torch_device = torch_device
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._kernel_rows = matmul.kernel_rows
        self._kernels: dict[KernelForm, tuple[Kernel, Kernel, Kernel]] = {}

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels for all that was packed."""
        for kernels in self._kernels.values():
            yield from kernels

    def pack(
        self, weight: QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> CudaQuantizedLinear:
        """bias is on the device already. Raises TypeError for a form without kernels."""
        form = weight.form
        if isinstance(form, GroupedForm) or not has_kernels(form):
            raise TypeError(f"no kernels for {form}")
        if not self._kernels:
            self._allocate()
        self._kernels.setdefault(form, quantized_kernels(form, self._dtype))
        parts = (part.to(self._torch_device) for part in weight.parts)
        values, scales, zeros = _pack_parts(form, *parts)
        return CudaQuantizedLinear(form, weight.shape, values, scales, zeros, bias, scale, is_gated)

    def _allocate(self) -> None:
        """Allocate what `scratch_bytes` announces; a model without such linears needs none of it."""
        device, num_values = self._torch_device, SCRATCH_BYTES // self._dtype.itemsize
        if self._max_tokens > self._kernel_rows:
            self._scratch = torch.empty(num_values, dtype=self._dtype, device=device)
        self._numbers = torch.arange(self._max_tokens + 1, dtype=torch.int32, device=device)

    def multiply(self, x: Tensor, weights: CudaQuantizedLinear, out: Tensor) -> Tensor:
        """Write (x [T, in] · weights + bias) × scale to out [T, out]; return out."""
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
        """As multiply_experts in kernels/expert_products.cu; weights [num_experts * outputs, inputs]."""
        rows, inputs = weights.shape
        outputs = rows // num_experts
        bias = x if weights.bias is None else weights.bias
        grid = (-(-outputs // TILE_OUTPUTS), most_tiles(len(out), num_experts), 1)
        self._launcher.launch(
            self._kernels[weights.form][0], grid, x, tokens, *weights.parts, bias, ends,
            out, *map(np.int32, (num_experts, outputs, inputs, gathers, weights.bias is not None)),
            np.float32(weights.scale),
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
            np.int32(len(rows.slots)), np.int32(vocab_size), np.int32(hidden), np.float32(scale),
        )  # fmt: skip

    def _multiply_widened(self, x: Tensor, weights: CudaQuantizedLinear, out: Tensor) -> Tensor:
        outputs, inputs = weights.shape
        kernel = self._kernels[weights.form][1]
        step = len(self._scratch) // inputs // TILE_OUTPUTS * TILE_OUTPUTS
        for first in range(0, outputs, step):
            count = min(step, outputs - first)
            widened = self._scratch[: count * inputs].view(count, inputs)
            grid = (count, -(-inputs // (_VALUES * kernel.num_threads)), 1)
            self._launcher.launch(kernel, grid, *weights.parts, widened, np.int32(first), np.int32(inputs))
            bias = None if weights.bias is None else weights.bias[first : first + count]
            part = CudaLinear(widened, widened.t(), bias, weights.scale)
            WholeMatmul().multiply(x, part, out[:, first : first + count])
        return out


def most_tiles(num_pairs: int, num_experts: int) -> int:
    """Return how many tiles of rows there may be, with rows of one expert each."""
    return num_pairs // TILE_ROWS + min(num_experts, num_pairs)


def _is_int4(form: KernelForm) -> bool:
    return isinstance(form, PackedForm) and form.group_size is not None


def _chunk_inputs(form: KernelForm) -> int:
    return 2 * _CHUNK_BYTES if _is_int4(form) else _CHUNK_BYTES


def _pack_parts(form: KernelForm, values: Tensor, scales: Tensor, *zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of a QuantizedWeight on the device → those of a CudaQuantizedLinear."""
    outputs = len(values)
    filled = functional.pad(values.view(torch.uint8), (0, -values.shape[1] % _CHUNK_BYTES))
    if isinstance(form, Float8Form) or form.group_size is None:
        steps = filled.view(outputs, -1, 2, 4, 8)
        scales = scales.contiguous()
        return steps.transpose(2, 3).reshape(outputs, -1), scales, scales
    pairs = filled.view(outputs, -1, 4, 4, 4)  # chunk, step, lane, two inputs in each of four bytes
    low, high = pairs & 15, pairs >> 4
    words = torch.stack([part[..., i] | part[..., i + 1] << 4 for part in (low, high) for i in (0, 2)], dim=-1)
    groups = filled.shape[1] * 2 // form.group_size
    scales, zero = (functional.pad(part, (0, groups - part.shape[1])) for part in (scales.half(), *zeros))
    return words.transpose(2, 3).reshape(outputs, -1), scales, zero
