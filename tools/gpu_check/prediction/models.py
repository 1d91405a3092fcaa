"""Predicts whole steps of a model: the kernels of a layer, and the gaps between them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.tools.gpu_check import model_configs
from penstock.tools.gpu_check.prediction.kernels import KV_BYTES, Heads

if TYPE_CHECKING:
    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.tools.gpu_check.prediction.kernels import KernelTimes

_KERNELS_OF_LAYER = 9
_FUSED_ROWS = 32
"""Steps of up to this many rows run four products of our own and attention in each layer."""
_KERNELS_BESIDE_GRAPH = 20
"""Kernels of a mixed step that its graph does not contain: its last layer behind the cache write, and the sampler."""
_MIXED_TOKENS, _MIXED_MULTIPLE = 512, 64
"""Steps of a prompt of up to this many tokens are captured, padded to a multiple of 64."""
_KERNELS_OF_STEP = 5
"""Changes of page tables, embedding, plan of the chunks, last norm, logits; the sampler's are counted with it."""


@dataclass(frozen=True)
class ModelShape:
    num_layers: int
    hidden: int
    intermediate: int
    vocab_size: int
    heads: Heads

    @classmethod
    def of(cls, config: DecoderConfig) -> ModelShape:
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        return cls(config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size, heads)


LLAMA_8B, QWEN3_06B = (ModelShape.of(config) for config in (model_configs.LLAMA_8B, model_configs.QWEN3_06B))


@dataclass(frozen=True)
class ModelTimes:
    kernels: KernelTimes
    shape: ModelShape

    def decode_step(self, num_rows: int, num_tokens: int, kv_dtype: str = "bf16") -> float:
        """Microseconds of a captured step of num_rows sequences of num_tokens each."""
        attention_us = self.kernels.decode_attention(self.shape.heads, num_rows, num_tokens, kv_dtype)
        return self._device_us(num_rows, num_rows, attention_us, kv_dtype, is_fused=num_rows <= _FUSED_ROWS)

    def prefill_step(self, num_tokens: int, kv_dtype: str = "bf16", history: int = 0) -> float:
        """Microseconds of a step of one sequence's tokens."""
        attention_us = self.kernels.prefill_attention(self.shape.heads, history, num_tokens, kv_dtype)
        return self._long_step(num_tokens, 1, attention_us, kv_dtype, is_captured=num_tokens <= _MIXED_TOKENS)

    def mixed_step(self, num_rows: int, num_tokens: int, prompt_tokens: int, *, is_captured: bool) -> float:
        """Microseconds of a step of num_rows sequences of num_tokens each, and of a prompt's first tokens."""
        attention_us = self.kernels.decode_attention(self.shape.heads, num_rows, num_tokens, "bf16")
        attention_us += self.kernels.prefill_attention(self.shape.heads, 0, prompt_tokens, "bf16")
        attention_us += self.kernels.machine.node_gap_us
        return self._long_step(num_rows + prompt_tokens, num_rows + 1, attention_us, "bf16", is_captured=is_captured)

    def prefill(self, num_tokens: int, step_tokens: int = 2048) -> float:
        """Microseconds of a prompt in steps of at most step_tokens."""
        starts = range(0, num_tokens, step_tokens)
        return sum(self.prefill_step(min(step_tokens, num_tokens - start), history=start) for start in starts)

    def offline(self, count: int = 256, shortest: int = 100, longest: int = 1024) -> tuple[float, int]:
        """Microseconds and new tokens of requests of random lengths that all start at once."""
        draw = random.Random(0)  # noqa: S311 - fixed seed, so that the prediction does not change
        prompts = [draw.randint(shortest, longest) for _ in range(count)]
        outputs = [draw.randint(shortest, longest) for _ in range(count)]
        total_us = sum(prompts) / 2048 * self.prefill_step(2048)
        every = 8
        for step in range(0, max(outputs), every):
            lengths = [p + step for p, o in zip(prompts, outputs, strict=True) if o > step]
            total_us += every * self.decode_step(len(lengths), sum(lengths) // len(lengths))
        return total_us, sum(outputs)

    def _long_step(
        self, num_tokens: int, num_rows: int, attention_us: float, kv_dtype: str, *, is_captured: bool
    ) -> float:
        """The host launches while the GPU computes; the longer of both counts."""
        count = self.shape.num_layers * _KERNELS_OF_LAYER + _KERNELS_OF_STEP
        if is_captured:
            num_tokens, count = -(-num_tokens // _MIXED_MULTIPLE) * _MIXED_MULTIPLE, _KERNELS_BESIDE_GRAPH
        device_us = self._device_us(num_tokens, num_rows, attention_us, kv_dtype, is_fused=False)
        return max(device_us, count * self.kernels.machine.launch_us)

    def _device_us(
        self, num_tokens: int, num_rows: int, attention_us: float, kv_dtype: str, *, is_fused: bool
    ) -> float:
        shape, times = self.shape, self.kernels
        heads, hidden = shape.heads, shape.hidden
        q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        qkv_size = q_size + 2 * kv_size
        products = [
            (qkv_size, hidden), (hidden, q_size), (2 * shape.intermediate, hidden), (hidden, shape.intermediate),
        ]  # fmt: skip
        machine = times.machine
        if is_fused:
            layer_us = attention_us + sum(times.row_product(num_tokens, *sizes) for sizes in products)
            layer_us += (len(products) + 1) * machine.dependent_gap_us
        else:
            layer_us = attention_us + sum(times.product(num_tokens, *sizes) for sizes in products)
            layer_us += 2 * times.elementwise(num_tokens * hidden * 12)
            layer_us += times.elementwise(num_tokens * (2 * qkv_size + q_size * 2 + 2 * kv_size * KV_BYTES[kv_dtype]))
            layer_us += times.elementwise(num_tokens * shape.intermediate * 6) + _KERNELS_OF_LAYER * machine.node_gap_us
        step_us = times.product(num_rows, shape.vocab_size, hidden) + 2 * times.elementwise(num_tokens * hidden * 6)
        step_us += times.sampling(num_rows, shape.vocab_size, filtered=False)
        return shape.num_layers * layer_us + step_us + _KERNELS_OF_STEP * machine.node_gap_us
