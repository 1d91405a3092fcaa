"""A decode step of few rows in five kernels a layer: operations of `CudaOps` wait until one kernel does several.

A product waits for the norm behind it, which names the weight that the product's kernel multiplies by. The product of
q, k and v waits for the rotation. Which steps run so depends on the number of rows, the model and the GPU's settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.passes.cuda.attention.step_attention import StepAttention
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.memory.lora import CudaAdapters
from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory
from penstock.backend.passes.cuda.ops.activations import Residual, head_shape, narrow
from penstock.backend.passes.cuda.ops.cuda_ops import CudaOps
from penstock.backend.passes.cuda.ops.matmul import Matmul
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear
from penstock.backend.passes.cuda.ops.row_products import (
    CLAIMING_BLOCKS,
    HEAD_DIM_UNIT,
    MAX_ROWS,
    ROW_DTYPE,
    ROW_FORMS,
    RowForm,
    RowLinear,
    RowProducts,
    WeighedRows,
    form_of,
)
from penstock.backend.passes.cuda.step.step_buffers import StepBuffers
from penstock.backend.passes.cuda.step.step_rows import CudaStep
from penstock.backend.passes.ops.interface import AttentionLayer


def fuses(config: DecoderConfig, dtype: torch.dtype, matmul: Matmul) -> bool:
    """Whether decode steps of few rows run in fused kernels.

    Not with an invariant `Matmul`: there all products of a weight use one kernel, whatever the number of rows.
    """
    names = config.names
    is_plain = names.attention_output_norm is None and names.mlp_output_norm is None and not config.parallel_blocks
    has_norms = config.norm == "rms" and names.attention_norm is not None and names.mlp_norm is not None
    return (
        dtype == ROW_DTYPE
        and not matmul.is_invariant
        and is_plain
        and has_norms
        and config.experts is None
        and config.delta_net is None
        and not config.gated_attention
        and config.mlp == "gated"
        and config.activation == "silu"
        and config.qk_norm in (None, "head")
        and config.head_dim % HEAD_DIM_UNIT == 0
    )


def make_ops(
    device: Device,
    config: DecoderConfig,
    dtype: torch.dtype,
    max_tokens: int,
    max_rows: int,
    matmul: Matmul,
    *,
    rounded_rows: int | None,
    memory: DeviceMemory | None = None,
    product_rows: int = MAX_ROWS,
    adapter_bytes: int = 0,
    claims_products: bool = False,
) -> CudaOps:
    """Return the operations of a model. product_rows and claims_products are settings of `FusedCudaOps`, adapter_bytes
    the memory of all adapters at a time, 0 for none; the other arguments are those of `CudaOps`."""
    adapters = None
    if adapter_bytes:
        adapters = CudaAdapters(device.launcher, device.torch_device, dtype, max_tokens, adapter_bytes)
    ops = (FusedCudaOps if fuses(config, dtype, matmul) else CudaOps)(
        device, config, dtype, max_tokens, max_rows, matmul, rounded_rows=rounded_rows, memory=memory,
        adapters=adapters,
    )  # fmt: skip
    if isinstance(ops, FusedCudaOps):
        ops.product_rows, ops.claims_products = product_rows, claims_products
    return ops


class _Projection(NamedTuple):
    """The product of q, k and v, before its kernel is launched."""

    rows: WeighedRows
    weights: RowLinear


class _Summed(Residual):
    """A residual stream with a product that the next norm's kernel adds."""

    __slots__ = ("product",)

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        self.product: tuple[Tensor, RowLinear] | None = None


class FusedCudaOps(CudaOps):
    """Implements `Ops`, for a model that `fuses` accepts. Only models whose linears all have kernels run this way."""

    _forms: frozenset[RowForm] = frozenset()
    """Forms of all packed linears."""
    product_rows = MAX_ROWS
    """Most rows of a fused step if no linear is quantised: with more, the library's products may be faster. Quantised
    products have no library, so they always take MAX_ROWS."""
    claims_products = False
    """Whether blocks claim tiles of products of few rows."""
    _fuses_step = False

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> RowLinear:
        packed = super().pack_linear(weight, bias, scale, is_gated=is_gated)
        self._forms = self._forms | {form_of(packed)}
        return packed

    def open_cache(
        self,
        layout: CacheLayout,
        buffers: StepBuffers,
        last_tokens: Tensor,
        ropes: tuple[Tensor, ...],
        attention: dict[int | None, StepAttention],
        full_layout: CacheLayout | None = None,
    ) -> None:
        super().open_cache(layout, buffers, last_tokens, ropes, attention, full_layout)
        config = self._config
        self._products = RowProducts(
            self._launcher, self._device.torch_device, head_shape(config), config.hidden_size,
            config.rope.rotary_dim, config.norm_eps, layout,
            CLAIMING_BLOCKS * self._device.num_sms if self.claims_products else 0,
            ropes_by_token=bool(config.rope.axes),
        )  # fmt: skip

    def kernels(self) -> Iterator[Kernel]:
        yield from super().kernels()
        if self._max_fused_rows > 0:
            yield from self._products.kernels(self._forms)

    @property
    def _max_fused_rows(self) -> int:
        if not self._forms.issubset(ROW_FORMS):
            return 0
        return self.product_rows if self._forms == {None} else MAX_ROWS

    def resume(self, step: CudaStep) -> tuple[Tensor, Residual]:
        is_decode = step.is_decode_only and not step.is_scored and step.adapters is None
        self._fuses_step = is_decode and step.num_tokens <= self._max_fused_rows
        return super().resume(step)

    def embed(self, table: Tensor | CudaQuantizedLinear, step: CudaStep) -> Residual:
        residual = super().embed(table, step)
        return _Summed(residual.values) if self._fuses_step else residual

    def norm(self, residual: Residual, weight: Tensor | None) -> Tensor | WeighedRows:  # type: ignore[override]
        if not isinstance(residual, _Summed) or weight is None:
            return super().norm(residual, weight)
        return self._begin_norm(residual, weight)

    def final_norm(self, residual: Residual, weight: Tensor | None) -> Tensor:
        if isinstance(residual, _Summed) and weight is not None:
            self._begin_norm(residual, weight)
        return super().norm(residual, weight)

    def _begin_norm(self, residual: _Summed, weight: Tensor) -> WeighedRows:
        hidden = self._now.hidden
        if residual.product is None:
            return self._products.weigh(residual.values, weight, hidden)
        product, residual.product = residual.product, None
        return self._products.add(*product, residual.values, weight, hidden)

    def linear(self, x: Tensor | WeighedRows, weights: Any) -> Any:
        return _Projection(x, weights) if isinstance(x, WeighedRows) else super().linear(x, weights)

    def rotate_and_store(self, qkv: Tensor | _Projection, step: CudaStep, layer: AttentionLayer) -> None:
        if not isinstance(qkv, _Projection):
            super().rotate_and_store(qkv, step, layer)
            return
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        rope = None if layer.rope is None else self._ropes[layer.rope]
        query_rope = None if layer.query_rope is None else self._ropes[layer.query_rope]
        cache, page_table = self._pages_of(layer)
        self._products.store(*qkv, self._now.qkv, cache, page_table, step.rows, rope, norms, query_rope)

    def attention(self, qkv: Tensor | _Projection, step: CudaStep, layer: AttentionLayer) -> Tensor:
        return super().attention(self._now.qkv if isinstance(qkv, _Projection) else qkv, step, layer)

    def linear_add(self, x: Tensor, weights: Any, residual: Residual, norm: Tensor | None = None) -> None:
        if isinstance(residual, _Summed):
            residual.product = x, weights
        else:
            super().linear_add(x, weights, residual, norm)

    def activated_linear(self, x: Tensor | WeighedRows, weights: Any) -> Tensor:
        if not isinstance(x, WeighedRows):
            return super().activated_linear(x, weights)
        out = narrow(self._now.gated, weights.num_outputs // 2)
        self._products.gate(x, weights, out)
        return out

    def _multiply(self, x: Tensor, weights: RowLinear, out: Tensor) -> Tensor:
        if self._fuses_step:
            return self._products.multiply(x, weights, out)
        return super()._multiply(x, weights, out)
