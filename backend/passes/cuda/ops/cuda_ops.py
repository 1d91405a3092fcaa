"""The decoder's operations on a GPU: torch multiplies matrices, our kernels do the rest. See `fused_ops` for few rows.

All work runs in order in the device's stream. No step allocates: an operation returns a buffer that its next call
overwrites. The residual stream keeps its last addend separate, because one kernel does the addition and the next norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cuda.attention.delta_net import CudaDeltaNetOps
from penstock.backend.passes.cuda.attention.step_attention import StepAttention, layer_windows
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.memory.lora import CudaAdapters
from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory
from penstock.backend.passes.cuda.ops.activations import (
    Activations,
    Residual,
    activation_widths,
    head_shape,
    max_linear_inputs,
    narrow,
)
from penstock.backend.passes.cuda.ops.device_weights import DeviceWeights
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.cuda.ops.expert_ops import CudaExpertOps
from penstock.backend.passes.cuda.ops.matmul import CudaLinear, Matmul
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.cuda.ops.rounded_rows import RoundedProducts
from penstock.backend.passes.cuda.ops.side_ops import CudaSideOps
from penstock.backend.passes.cuda.step.step_buffers import StepBuffers
from penstock.backend.passes.cuda.step.step_rows import CudaStep
from penstock.backend.passes.ops.interface import AttentionLayer, HeadShape


def upload_rows(device: Device, values: NDArray[np.float32], out: Tensor) -> None:
    """Copy rows of the host to out, without waiting."""
    # torch reuses pinned memory only after the copy from it has completed.
    staged = device.pinned(out.numel(), torch.float32).view(out.shape)
    staged.numpy()[:] = values
    out.copy_(staged, non_blocking=True)


class CudaOps(DeviceWeights):
    """Implements `Ops`. dtype is that of weights and activations. Call `open_cache` before the first step."""

    _token_adapters: Tensor | None = None
    """`CudaStep.adapters` of the current operations."""

    def __init__(
        self,
        device: Device,
        config: DecoderConfig,
        dtype: torch.dtype,
        max_tokens: int,
        max_rows: int,
        matmul: Matmul,
        *,
        rounded_rows: int | None = None,
        memory: DeviceMemory | None = None,
        adapters: CudaAdapters | None = None,
    ) -> None:
        """rounded_rows: the fewest that get 8 bits; None: no rows do. memory: of the weights, by default this
        process's own. adapters: None if there are never any."""
        rounded = None
        if rounded_rows is not None:
            rounded = RoundedProducts(
                device.launcher, device.torch_device, dtype, max_tokens, max_linear_inputs(config),
                device.compute_capability, rounded_rows,
            )  # fmt: skip
        quantized = QuantizedProducts(device.launcher, device.torch_device, dtype, max_tokens, matmul, rounded, memory)
        super().__init__(device.torch_device, dtype, quantized, memory)
        self._device = device
        self._launcher, self._config = device.launcher, config
        self._matmul, self.adapters = matmul, adapters
        self._embedding_scale = Dtype.of(dtype).round(config.scales.embedding)

        def zeros(rows: int, width: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=of, device=device.torch_device)

        widths, num_rows = activation_widths(config), matmul.padded_rows(max_tokens)
        self._all = Activations(
            **{name: zeros(num_rows, width) for name, width in widths.items() if name != "residual"},
            residual=zeros(num_rows, config.hidden_size, torch.float32),
        )
        self._now = self._all
        """The first rows of `_all`, as many as the current operations have tokens."""
        self._last_residual = zeros(max_rows, config.hidden_size, torch.float32)
        self._last_qkv = zeros(max_rows, widths["qkv"])
        self._last_hidden = zeros(matmul.padded_rows(max_rows), config.hidden_size)
        self._logits = zeros(matmul.padded_rows(max_rows), config.logits_width)
        self._no_sinks = torch.full((config.num_heads,), -torch.inf, device=device.torch_device)
        self.experts = None
        if config.experts is not None:
            self.experts = CudaExpertOps(
                self._launcher, device.torch_device, config.hidden_size, config.experts, dtype, max_tokens, matmul,
                quantized, self._activate_gated, self,
            )  # fmt: skip
        self.side = None
        if config.layer_input_size or config.has_experts_beside:
            self.side = CudaSideOps(
                self._launcher, config, dtype, device.torch_device, max_tokens, num_rows, self, self.experts,
                lambda: self._elementwise, lambda: (self._buffers.input_ids, self._last_tokens), self._embed_rows,
                self.norm, self.linear_add, self._multiply, lambda: self._now,
            )  # fmt: skip
        self.delta_net = self.mtp = None
        if (net := config.delta_net) is not None:
            self.delta_net = CudaDeltaNetOps(
                self._launcher, device.torch_device, config, net, dtype, max_tokens, num_rows, self.vector,
                lambda gates: CudaLinear(wide := self.vector(gates), wide.t(), None), matmul.multiply, self._adapt,
                lambda width: narrow(self._now.attended, width),
            )  # fmt: skip

    def open_cache(
        self,
        layout: CacheLayout,
        buffers: StepBuffers,
        last_tokens: Tensor,
        ropes: tuple[Tensor, ...],
        attention: dict[int | None, StepAttention],
        full_layout: CacheLayout | None = None,
    ) -> None:
        """Allocate the cache. ropes: each [positions, rotary_dim]; last_tokens int32 by slot; attention by window.

        full_layout: of layers with `DecoderConfig.full_heads`.
        """
        config = self._config
        self.layout = layout
        self.cache = torch.zeros(
            layout.num_layers, layout.layer_bytes, dtype=torch.uint8, device=self._device.torch_device
        )
        self.full_cache = self.cache[:0]
        if full_layout is not None:
            shape = full_layout.num_layers, full_layout.layer_bytes
            self.full_cache = torch.zeros(shape, dtype=torch.uint8, device=self._device.torch_device)
        self._layer_caches = list(self.cache)
        if full_layout is not None:
            rest, num_own = (iter(self.cache), iter(self.full_cache)), config.num_layers - config.num_shared_layers
            self._layer_caches = [next(rest[config.has_full_heads(index)]) for index in range(num_own)]
        self.pages = self.cache.view(layout.num_layers, layout.num_pages, layout.page_bytes)
        self._buffers = buffers
        self._page_tables = list(buffers.page_tables)
        self._last_tokens = last_tokens
        size = self._all.residual.shape if config.picture_layers else (0, 0)
        self._picture_rows = torch.zeros(size, device=self._device.torch_device)
        self._ropes = ropes
        if config.rope.axes:
            self._axes = torch.tensor(config.rope.axes, dtype=torch.int32, device=self._device.torch_device)
            self._ropes = (ropes[0].new_zeros(len(self._all.residual), config.rope.rotary_dim),)
            """Of the step's tokens: `Elementwise.turn_tokens` of the rope by position."""
            self._rope_by_position = ropes[0]
        self._elementwise = Elementwise(
            self._launcher,
            head_shape(config),
            config.hidden_size,
            config.rope.rotary_dim,
            config.norm_eps,
            self._dtype,
            layout.kv_dtype,
            layout.page_size_tokens,
            self._device.torch_device,
            config.layer_input_size,
            ropes_by_token=bool(config.rope.axes),
        )
        self._attention = attention
        self.tiling = attention.get(None) or next(iter(attention.values()))
        """Cuts all layers' rows: that of a layer without a window, if there is one, whose contexts are the longest."""
        for each in attention.values():
            each.open(self._device)
        self._last_windows = set(layer_windows(config)[config.num_layers - config.num_shared_layers - 1 :])
        if self.delta_net is not None:
            self.delta_net.create_states(len(self._last_residual))

    def kernels(self) -> Iterator[Kernel]:
        """Yield every kernel that a step of the model launches."""
        yield from self._elementwise.kernels
        yield from self._quantized.kernels()
        if self.adapters is not None:
            yield from self.adapters.kernels
        if self.experts is not None:
            yield from self.experts.kernels
        if self.delta_net is not None:
            yield from self.delta_net.kernels
        if self.side is not None:
            yield from self.side.kernels
        for attention in self._attention.values():
            yield from attention.kernels()

    def begin(self, step: CudaStep) -> None:
        """Start a step: compute what all its layers share."""
        self.resume(step)
        if step.rope_positions is not None:
            turns = self._ropes[0][: step.num_tokens]
            self._elementwise.turn_tokens(self._rope_by_position, step.rope_positions, self._axes, turns)
        if len(step.decode_rows.slots):
            for attention in self._attention.values():
                attention.begin(step.decode_rows)

    def resume(self, step: CudaStep) -> tuple[Tensor, Residual]:
        """Continue a step whose beginning, `begin` and `DecoderModel.store_tokens`, a graph has run.

        Returns the result of the latter.
        """
        self._now, self._token_adapters = self._all.cut(step.num_tokens), step.adapters
        width, _ = self._config.mixer_widths(self._config.num_layers - self._config.num_shared_layers - 1)
        return narrow(self._now.qkv, width), Residual(self._now.residual)

    def residual_rows(self, first: int, num_rows: int) -> Tensor:
        """Return where to write a prompt's embeddings, before `embed`: [num_rows, hidden] fp32."""
        return self._all.residual[first : first + num_rows]

    def _add_pictures(self, index: int, residual: Residual, step: CudaStep) -> None:
        width = self._config.hidden_size
        for given in step.embeddings:
            rows = given.values.read()[:, (1 + index) * width : (2 + index) * width]
            if rows.size:  # other embeddings have nothing to add
                residual.add_pending()
                upload_rows(self._device, rows, added := self._picture_rows[: len(rows)])
                residual.values[given.first : given.first + len(rows)].add_(added)

    add_pictures = _add_pictures

    def embed(self, table: Tensor | CudaQuantizedLinear, step: CudaStep) -> Residual:
        residual = self._now.residual
        self._embed_rows(table, self._buffers.input_ids[: step.num_tokens], step, residual, self._embedding_scale)
        return Residual(residual)

    def _embed_rows(
        self, table: Tensor | CudaQuantizedLinear, ids: Tensor, step: CudaStep, out: Tensor, scale: float
    ) -> None:
        """Write the rows of the step's tokens, times scale, to out fp32."""
        if isinstance(table, CudaQuantizedLinear):
            self._quantized.embed(table, ids, step.rows, self._last_tokens, out, scale)
        else:
            self._elementwise.embed(table, ids, step.rows, self._last_tokens, out, scale)

    def norm(self, residual: Residual, weight: Tensor | None) -> Tensor:
        out = self._now.hidden
        if weight is None:
            residual.add_pending()
            return out.copy_(residual.values)
        is_layer_norm = self._config.norm == "layer"
        add_norm = self._elementwise.add_layer_norm if is_layer_norm else self._elementwise.add_rms_norm
        add_norm(residual.values, residual.pending, weight, out)
        residual.pending = None
        return out

    def final_norm(self, residual: Residual, weight: Tensor | None) -> Tensor:
        return self.norm(residual, weight)

    def linear(self, x: Tensor, weights: CudaLinear | CudaQuantizedLinear) -> Tensor:
        return self._multiply(x, weights, narrow(self._now.qkv, weights.num_outputs))

    def linear_add(
        self, x: Tensor, weights: CudaLinear | CudaQuantizedLinear, residual: Residual, norm: Tensor | None = None
    ) -> None:
        residual.add_pending()
        product = self._multiply(x, weights, self._now.added)
        if norm is None:
            residual.pending = product
        else:
            self._elementwise.rms_norm_added(residual.values, product, norm)

    def activated_linear(self, x: Tensor, weights: CudaLinear | CudaQuantizedLinear) -> Tensor:
        outputs = weights.num_outputs
        product = self._multiply(x, weights, narrow(self._now.gate_up, outputs))
        if weights.is_gated:
            out = narrow(self._now.gated, outputs // 2)
            self._activate_gated(product, out)
        else:
            out = narrow(self._now.gated, outputs)
            self._elementwise.gelu(product, out)
        return out

    def _activate_gated(self, gate_up: Tensor, out: Tensor) -> None:
        activate = self._elementwise.silu_mul if self._config.activation == "silu" else self._elementwise.gelu_mul
        activate(gate_up, out)

    def _multiply(self, x: Tensor, weights: CudaLinear | CudaQuantizedLinear, out: Tensor) -> Tensor:
        if isinstance(weights, CudaQuantizedLinear):
            self._quantized.multiply(x, weights, out)
        else:
            self._matmul.multiply(x, weights, out)
        self._adapt(x, weights, out)
        return out

    def _adapt(self, x: Tensor, weights: CudaLinear | CudaQuantizedLinear, out: Tensor) -> None:
        if self._token_adapters is not None and self.adapters is not None:
            self.adapters.add(x, weights, out, self._token_adapters)

    def rotate_and_store(self, qkv: Tensor, step: CudaStep, layer: AttentionLayer) -> None:
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        if norms is not None and self._config.qk_norm == "projection":
            self._elementwise.norm_q_and_k(qkv, *norms)
            norms = None
        rope = None if layer.rope is None else self._ropes[layer.rope]
        query_rope = None if layer.query_rope is None else self._ropes[layer.query_rope]
        cache, page_table = self._pages_of(layer)
        if layer.v_norm is not None and rope is not None:
            heads = self._heads_of(layer)
            if layer.source is not None:
                heads = replace(heads, num_kv_heads=0)
            of_heads = layer.q_norm, layer.k_norm, layer.v_norm
            self._elementwise.rope_and_store_wide(qkv, cache, page_table, step.rows, rope, of_heads, heads)
            return
        self._elementwise.rope_and_store(
            qkv, cache, page_table, step.rows, rope, norms, query_rope, has_layer_norms=self._config.norm == "layer"
        )

    def _pages_of(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Return the layer's part of the cache, and the page table of its group."""
        own = layer.index if layer.source is None else layer.source
        index = layer.cache_index if self._config.full_heads is None else own
        return self._layer_caches[index], self._page_tables[layer.group]

    def _heads_of(self, layer: AttentionLayer) -> HeadShape:
        return HeadShape(self._config.num_heads, *self._config.heads_of_layer(layer.index))

    def attention(self, qkv: Tensor, step: CudaStep, layer: AttentionLayer) -> Tensor:
        heads = self._heads_of(layer)
        out = narrow(self._now.attended, heads.output_size)
        cache, page_table = self._pages_of(layer)
        sinks = self._no_sinks if layer.sinks is None else layer.sinks
        self._attention[layer.window_tokens].attend(qkv, cache, page_table, step, sinks, out)
        if self._config.gated_attention:
            self._elementwise.sigmoid_mul(qkv[:, heads.output_size : 2 * heads.output_size], out)
        return out

    def last_tokens(self, qkv: Tensor, residual: Residual, step: CudaStep) -> tuple[Tensor, Residual, CudaStep]:
        if step.is_decode_only or step.is_scored:
            return qkv, residual, step
        residual.add_pending()
        num_logits = len(step.logit_tokens)
        self._now = self._all.cut(num_logits)
        last_qkv = narrow(self._last_qkv[:num_logits], qkv.shape[1])
        values = self._last_residual[:num_logits]
        self._elementwise.gather_rows(qkv, step.logit_tokens, last_qkv)
        self._elementwise.gather_rows(residual.values, step.logit_tokens, values)
        rows = step.logit_rows
        if step.adapters is not None:
            self._token_adapters = self._buffers.logit_adapters[:num_logits]
        for window in self._last_windows:
            self._attention[window].begin(rows)
        narrowed = CudaStep(num_logits, rows, rows, None, rows, step.logit_tokens, True, adapters=self._token_adapters)
        return last_qkv, Residual(values), narrowed

    def logit_rows(self, normed: Tensor, step: CudaStep) -> Tensor:
        return self.gather_normed(step.logit_tokens) if step.is_scored else normed

    def gather_normed(self, tokens: Tensor) -> Tensor:
        """Return the final norm's output for tokens int32 [n] of a scored step, [n, hidden]; n is at most max_rows.

        The next call overwrites it.
        """
        out = self._last_hidden[: len(tokens)]
        if len(tokens):
            self._elementwise.gather_rows(self._all.hidden, tokens, out)
        return out

    def logits(self, x: Tensor, weights: CudaLinear | CudaQuantizedLinear) -> Tensor:
        """Return [L, vocab] in the weights' dtype; see `last_logits`."""
        logits = self._multiply(x, weights, self._logits[: len(x)])
        cap = self._config.scales.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def last_logits(self, num_rows: int) -> Tensor:
        """Return the latest result of `logits`, [num_rows, vocab]; the next step overwrites it."""
        return self._logits[:num_rows]

    def last_normed(self, num_rows: int, *, is_scored: bool) -> Tensor:
        """Return the final norm's output for these logits, [num_rows, hidden] in the weights' dtype.

        is_scored as in the step. The next step overwrites the result.
        """
        return (self._last_hidden if is_scored else self._all.hidden)[:num_rows]

    def close(self) -> None:
        """Release the cache and the buffers."""
        self.__dict__.clear()
