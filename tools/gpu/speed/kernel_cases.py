"""The kernel cases that are timed and profiled, by name: what each launches, moves and computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.forward_pass import SamplingParams, SlotInit
from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.cuda.attention.encoder_attention import EncoderAttention
from penstock.backend.passes.cuda.attention.prefill_attention import WGMMA_CAPABILITY, PrefillAttention
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.ops.activations import Residual
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.cuda.ops.expert_ops import CudaExpertOps
from penstock.backend.passes.cuda.ops.matmul import WholeMatmul
from penstock.backend.passes.cuda.ops.packed_weights import packed_bytes
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.cuda.step.device_sampler import DeviceSampler, SlotArrays
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import ExpertWeights, HeadShape
from penstock.tools.gpu.cases.products.quantized import FORMS, random_weight
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.random_weights import LLAMA_8B

PAGE_TOKENS = 32
LLAMA_HEADS = HeadShape(LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
QWEN3_EXPERTS = Experts(128, 8, 768, normalises=True)
"""The experts of Qwen3 30B-A3B."""


@dataclass(frozen=True)
class KernelSizes:
    """Shapes of the cases; the 8B model's by default, smaller in tests."""

    heads: HeadShape = LLAMA_HEADS
    decode: tuple[tuple[str, int, int, str], ...] = (
        ("64x1k", 64, 1024, "bf16"),
        ("8x4k", 8, 4096, "bf16"),
        ("1x1k", 1, 1024, "bf16"),
        ("64x1k.q8_0", 64, 1024, "q8_0"),
        ("64x1k.fp8", 64, 1024, "fp8"),
        ("64x1k.fp32", 64, 1024, "fp32"),
        ("256x1k", 256, 1024, "bf16"),
        ("64x8k", 64, 8192, "bf16"),
        ("1x32k", 1, 32768, "bf16"),
        ("8x1k", 8, 1024, "bf16"),
        ("64x8k.q8_0", 64, 8192, "q8_0"),
    )
    """Name, rows, tokens per row, KV dtype."""
    prefill: tuple[tuple[str, int, int, str], ...] = (
        ("4k", 0, 4096, "bf16"),
        ("8k", 0, 8192, "bf16"),
        ("1k", 0, 1024, "bf16"),
        ("1k_after_8k", 8192, 1024, "bf16"),
        ("4k.q8_0", 0, 4096, "q8_0"),
        ("4k.fp8", 0, 4096, "fp8"),
    )
    """Name, history, new tokens, KV dtype."""
    encoder: tuple[tuple[str, int, int, int | None], ...] = (
        ("128x128", 128, 128, None),
        ("32x512", 32, 512, None),
        ("2x8k", 2, 8192, None),
        ("2x8k.local", 2, 8192, 64),
    )
    """Name, rows, tokens of each, window."""
    encoder_heads: int = 12
    sampling_rows: int = 256
    vocab_size: int = LLAMA_8B.vocab_size
    elementwise_tokens: tuple[int, ...] = (64, 8192)
    hidden: int = LLAMA_8B.hidden_size
    intermediate: int = LLAMA_8B.intermediate_size
    product_rows: tuple[int, ...] = (1, 16, 64)
    fused_rows: tuple[int, ...] = (1, 8, 16, 32)
    experts: Experts = QWEN3_EXPERTS
    expert_hidden: int = 2048
    expert_tokens: tuple[int, ...] = (1, 64, 2048)
    cold_bytes: int = 1 << 30
    """Total bytes that are read in turn: many times the size of the L2 cache."""
    library_rows: tuple[int, ...] = (1, 4, 16, 32, 64, 256, 512)
    peers: tuple[tuple[str, int, int, int], ...] = (
        ("cudnn.decode.64x1k", 64, 1, 1024),
        ("cudnn.decode.8x4k", 8, 1, 4096),
        ("cudnn.decode.1x1k", 1, 1, 1024),
        ("cudnn.prefill.4k", 1, 4096, 4096),
        ("cudnn.prefill.8k", 1, 8192, 8192),
    )
    """Name, rows, queries of each, tokens of each: the queries are all tokens, or the last one."""

    def describe(self) -> str:
        """The sizes that the cases' names omit."""
        heads = f"{self.heads.num_heads}/{self.heads.num_kv_heads} heads of {self.heads.head_dim}"
        return (
            f"{heads}, hidden {self.hidden}, intermediate {self.intermediate}, pages of {PAGE_TOKENS}, "
            f"sampling {self.sampling_rows} x {self.vocab_size}, "
            f"{self.experts.per_token} of {self.experts.count} experts of {self.experts.width} x {self.expert_hidden}"
        )


@dataclass(frozen=True)
class PreparedCase:
    """A case's buffers and launches.

    works do the same on different buffers, together larger than the L2 cache. amount is per work: bytes, or
    floating-point operations if unit is TFLOP/s.
    """

    works: list[Callable[[], object]]
    amount: float = 0.0
    unit: str = ""
    """Unit of the rate, TB/s or TFLOP/s; "" if only the time is recorded."""
    leads_with_time: bool = False
    detail: str = ""


@dataclass(frozen=True)
class KernelCase:
    name: str
    prepare: Callable[[DeviceContext], PreparedCase]
    """Allocates the buffers and loads the kernels."""


def kernel_cases(sizes: KernelSizes) -> Iterator[KernelCase]:
    """Yield all cases, the most important first."""
    for name, rows, tokens, kv_dtype in sizes.decode:
        yield KernelCase(f"attention.decode.{name}", partial(_decode, sizes, rows, tokens, kv_dtype))
    _, rows, tokens, kv_dtype = sizes.decode[0]
    yield KernelCase("attention.decode.plan", partial(_plan, sizes, rows, tokens, kv_dtype))
    for name, history, tokens, kv_dtype in sizes.prefill:
        yield KernelCase(f"attention.prefill.{name}", partial(_prefill, sizes, history, tokens, kv_dtype))
    for name, rows, tokens, window in sizes.encoder:
        yield KernelCase(f"attention.encoder.{name}", partial(_encoder, sizes, rows, tokens, window))
    for kind, params in _SAMPLING.items():
        yield KernelCase(f"sampling.256x128k.{kind}", partial(_sampling, sizes, params, 3.0, 0.0))
    for kind, logits in _OTHER_LOGITS.items():
        yield KernelCase(f"sampling.256x128k.top_p.{kind}", partial(_sampling, sizes, _SAMPLING["top_p"], *logits))
    for num_tokens in sizes.elementwise_tokens:
        for kv_dtype in ("bf16", "q8_0"):
            stored = partial(_rope_and_store, sizes, num_tokens, kv_dtype)
            yield KernelCase(f"elementwise.rope_and_store.{kv_dtype}.{num_tokens}", stored)
        yield KernelCase(f"elementwise.norm.{num_tokens}", partial(_norm, sizes, num_tokens))
        yield KernelCase(f"elementwise.silu_mul.{num_tokens}", partial(_silu_mul, sizes, num_tokens))
    for form in FORMS:
        for num_rows in sizes.product_rows:
            yield KernelCase(f"product.{form}.{num_rows}", partial(_product, sizes, form, num_rows))
    for num_tokens in sizes.expert_tokens:
        yield KernelCase(f"experts.{num_tokens}", partial(_experts, sizes, num_tokens))


_SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, frequency_penalty=0.1, repetition_penalty=1.1),
    "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, typical_p=0.95, min_p=0.02),
}
_OTHER_LOGITS = {"flat": (0.5, 0.0), "peaked": (2.0, 14.0)}
"""Deviation of all logits, and what is added to one of 2,000: rows of which top-p keeps most tokens, or few."""


@dataclass(frozen=True)
class _DecodeStep:
    """A decode step. `plan` runs once per step; `attend` takes the cache to read."""

    layout: CacheLayout
    plan: Callable[[], object]
    attend: Callable[[Tensor], object]


def _decode(sizes: KernelSizes, num_rows: int, num_tokens: int, kv_dtype: str, context: DeviceContext) -> PreparedCase:
    """Decode attention. Counts each key and value once, scales included; the plan is not timed."""
    step = _decode_step(sizes, num_rows, num_tokens, kv_dtype, context)
    num_bytes = num_rows * num_tokens * 2 * sizes.heads.num_kv_heads * step.layout.row_bytes
    caches = _caches(context, step.layout, -(-sizes.cold_bytes // num_bytes))
    step.plan()
    return PreparedCase([partial(step.attend, cache) for cache in caches], num_bytes, "TB/s", num_rows == 1)


def _plan(sizes: KernelSizes, num_rows: int, num_tokens: int, kv_dtype: str, context: DeviceContext) -> PreparedCase:
    return PreparedCase([_decode_step(sizes, num_rows, num_tokens, kv_dtype, context).plan])


def _decode_step(
    sizes: KernelSizes, num_rows: int, num_tokens: int, kv_dtype: str, context: DeviceContext
) -> _DecodeStep:
    heads, device, page_tokens = sizes.heads, context.device, context.choices.page_size_tokens
    pages_per_row = -(-num_tokens // page_tokens)
    layout = CacheLayout(1, num_rows * pages_per_row, page_tokens, heads.num_kv_heads, heads.head_dim, kv_dtype)
    attention = DecodeAttention(
        layout,
        heads.num_heads,
        heads.head_dim**-0.5,
        max_rows=num_rows,
        max_context_tokens=num_tokens,
        num_sms=device.num_sms,
        shared_bytes_per_sm=device.shared_bytes_per_sm,
        choices=context.choices,
    )
    device.launcher.prepare(attention.kernels())
    workspace = attention.make_workspace(context.torch_device)
    act = torch.float32 if kv_dtype == "fp32" else torch.bfloat16
    qkv = torch.randn(num_rows, heads.qkv_size, device=context.torch_device).to(act)
    out = torch.empty(num_rows, heads.output_size, device=context.torch_device, dtype=act)
    sinks = torch.full((heads.num_heads,), -torch.inf, device=context.torch_device)
    page_table = _shuffled_pages(context, num_rows, pages_per_row)
    contexts = torch.full((num_rows,), num_tokens - 1, dtype=torch.int32, device=context.torch_device)
    slots = torch.arange(num_rows, dtype=torch.int32, device=context.torch_device)

    def attend(cache: Tensor) -> None:
        attention.attend(device.launcher, workspace, qkv, cache, page_table, sinks, out)

    return _DecodeStep(layout, partial(attention.plan, device.launcher, workspace, contexts, slots, num_rows), attend)


def _prefill(sizes: KernelSizes, history: int, num_tokens: int, kv_dtype: str, context: DeviceContext) -> PreparedCase:
    heads, device = sizes.heads, context.device
    num_pages = -(-(history + num_tokens) // PAGE_TOKENS)
    layout = CacheLayout(1, num_pages, PAGE_TOKENS, heads.num_kv_heads, heads.head_dim, kv_dtype)
    attention = PrefillAttention(
        layout,
        heads.num_heads,
        heads.head_dim**-0.5,
        choices=context.choices,
        has_wgmma=device.compute_capability == WGMMA_CAPABILITY,
        num_sms=device.num_sms,
    )
    device.launcher.prepare(attention.kernels())
    qkv = torch.randn(num_tokens, heads.qkv_size, device=context.torch_device).bfloat16()
    out = torch.empty(num_tokens, heads.output_size, device=context.torch_device, dtype=torch.bfloat16)
    sinks = torch.full((heads.num_heads,), -torch.inf, device=context.torch_device)
    starts, contexts = np.array([0, num_tokens], np.int32), np.array([history], np.int32)
    tiles = torch.from_numpy(attention.tiles(starts, contexts)).to(context.torch_device)
    rows = RowArrays(
        torch.from_numpy(starts).to(context.torch_device),
        torch.from_numpy(contexts).to(context.torch_device),
        torch.zeros(1, dtype=torch.int32, device=context.torch_device),
    )
    page_table = _shuffled_pages(context, 1, num_pages)
    (cache,) = _caches(context, layout, 1)
    pairs = num_tokens * history + num_tokens * (num_tokens + 1) / 2
    workspace = attention.workspace_sizes(num_tokens, history + num_tokens).make(context.torch_device)
    attend = partial(attention.attend, device.launcher, workspace, qkv, cache, page_table, rows, tiles, sinks, out)
    return PreparedCase([attend], 4 * pairs * heads.output_size, "TFLOP/s")


def _encoder(
    sizes: KernelSizes, num_rows: int, num_tokens: int, window: int | None, context: DeviceContext
) -> PreparedCase:
    """An encoder's attention in bf16, with heads of 64."""
    device = context.torch_device
    attention = EncoderAttention(sizes.encoder_heads, 64, torch.bfloat16, 0.125)
    context.device.launcher.prepare([attention.kernel])
    width, starts = 64 * sizes.encoder_heads, np.arange(num_rows + 1, dtype=np.int32) * num_tokens
    qkv = torch.randn(num_rows * num_tokens, 3 * width, device=device).bfloat16()
    out = torch.empty(num_rows * num_tokens, width, device=device, dtype=torch.bfloat16)
    row_starts, tiles = (torch.from_numpy(ints).to(device) for ints in (starts, attention.tiles(starts)))
    attend = partial(attention.attend, context.device.launcher, qkv, row_starts, tiles, out, window=window)
    seen = num_tokens if window is None else min(num_tokens, 2 * window + 1)
    return PreparedCase([attend], 4.0 * num_rows * num_tokens * seen * width, "TFLOP/s")


def _sampling(
    sizes: KernelSizes, params: SamplingParams, deviation: float, likely: float, context: DeviceContext
) -> PreparedCase:
    rows, vocab = sizes.sampling_rows, sizes.vocab_size
    arrays = SlotArrays(rows, vocab, context.torch_device)
    sampler = DeviceSampler(context.device.launcher, arrays, torch.bfloat16)
    context.device.launcher.prepare(sampler.kernels)
    logits = [torch.randn(rows, vocab, device=context.torch_device) * deviation for _ in range(4)]
    for x in logits:
        x[:, ::2000] += likely
    slots = torch.arange(rows, dtype=torch.int32, device=context.torch_device)
    contexts = torch.full((rows,), 100, dtype=torch.int32, device=context.torch_device)
    tokens = torch.empty(rows, dtype=torch.int32, device=context.torch_device)
    prompt = np.arange(100, dtype=np.int32)
    packed = sampler.pack([SlotInit(slot, params, prompt, len(prompt)) for slot in range(rows)])
    sampler.take_slots(torch.from_numpy(packed).to(context.torch_device), rows)
    features = sampler.features(np.arange(rows, dtype=np.int32))
    works: list[Callable[[], object]] = [
        partial(sampler.sample, x.bfloat16(), slots, contexts, features, tokens) for x in logits
    ]
    return PreparedCase(works, detail=f"{rows} rows of {vocab}")


def _rope_and_store(sizes: KernelSizes, num_tokens: int, kv_dtype: str, context: DeviceContext) -> PreparedCase:
    heads, elementwise = sizes.heads, _elementwise(sizes, kv_dtype, context)
    num_pages = -(-num_tokens // PAGE_TOKENS)
    layout = CacheLayout(1, num_pages, PAGE_TOKENS, heads.num_kv_heads, heads.head_dim, kv_dtype)
    rows = RowArrays(
        *(torch.tensor(x, dtype=torch.int32, device=context.torch_device) for x in ([0, num_tokens], [0], [0]))
    )
    qkv = torch.randn(num_tokens, heads.qkv_size, device=context.torch_device).bfloat16()
    rope = torch.rand(num_tokens, heads.head_dim, device=context.torch_device)
    (cache,) = _caches(context, layout, 1)
    page_table = _shuffled_pages(context, 1, num_pages)
    moved = 2 * (heads.qkv_size + heads.output_size) + 2 * heads.num_kv_heads * layout.row_bytes + heads.head_dim * 4
    work = partial(elementwise.rope_and_store, qkv, cache, page_table, rows, rope, None)
    return _traffic(work, num_tokens * moved)


def _norm(sizes: KernelSizes, num_tokens: int, context: DeviceContext) -> PreparedCase:
    elementwise = _elementwise(sizes, "bf16", context)
    residual = torch.randn(num_tokens, sizes.hidden, device=context.torch_device)
    delta, out = (torch.randn(num_tokens, sizes.hidden, device=context.torch_device).bfloat16() for _ in range(2))
    work = partial(
        elementwise.add_rms_norm, residual, delta, torch.ones(sizes.hidden, device=context.torch_device), out
    )
    return _traffic(work, num_tokens * sizes.hidden * (4 + 4 + 2 + 2))


def _silu_mul(sizes: KernelSizes, num_tokens: int, context: DeviceContext) -> PreparedCase:
    elementwise = _elementwise(sizes, "bf16", context)
    gate_up = torch.randn(num_tokens, 2 * sizes.intermediate, device=context.torch_device).bfloat16()
    gated = torch.empty(num_tokens, sizes.intermediate, device=context.torch_device, dtype=torch.bfloat16)
    return _traffic(partial(elementwise.silu_mul, gate_up, gated), num_tokens * sizes.intermediate * 6)


def _product(sizes: KernelSizes, form: str, num_rows: int, context: DeviceContext) -> PreparedCase:
    """The quantised product of an MLP's gate and up. Counts the weights' bytes."""
    weight, device = random_weight(2 * sizes.intermediate, sizes.hidden, FORMS[form]), context.torch_device
    products = QuantizedProducts(context.device.launcher, device, torch.bfloat16, num_rows, WholeMatmul())
    num_bytes = packed_bytes(weight.form, weight.shape, torch.bfloat16)
    linears = [products.pack(weight, None) for _ in range(-(-sizes.cold_bytes // num_bytes))]
    context.device.launcher.prepare(products.kernels())
    x = torch.randn(num_rows, sizes.hidden, device=device).bfloat16()
    out = torch.empty(num_rows, 2 * sizes.intermediate, device=device, dtype=torch.bfloat16)
    works: list[Callable[[], object]] = [partial(products.multiply, x, linear, out) for linear in linears]
    return PreparedCase(works, num_bytes, "TB/s", num_rows == 1)


def _experts(sizes: KernelSizes, num_tokens: int, context: DeviceContext) -> PreparedCase:
    """All of a layer's experts: routes, groups, products, sums. Only the time is recorded."""
    experts, hidden, device = sizes.experts, sizes.expert_hidden, context.torch_device
    launcher = context.device.launcher
    matmul = WholeMatmul(grouped_rows=context.choices.grouped_rows)
    elementwise = _elementwise(sizes, "bf16", context)
    products = QuantizedProducts(launcher, device, torch.bfloat16, num_tokens, matmul)
    ops = CudaExpertOps(
        launcher, device, hidden, experts, torch.bfloat16, num_tokens, matmul, products, elementwise.silu_mul
    )
    launcher.prepare(ops.kernels)
    router, gate_up, down = (
        torch.randn(experts.count * rows, inputs, device=device).bfloat16() / 32
        for rows, inputs in ((1, hidden), (2 * experts.width, hidden), (hidden, experts.width))
    )
    packed = ops.pack(ExpertWeights(router, gate_up, down), 1.0)
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    residual = Residual(torch.zeros(num_tokens, hidden, device=device))
    return PreparedCase([partial(ops.add, x, packed, residual)])


def _elementwise(sizes: KernelSizes, kv_dtype: str, context: DeviceContext) -> Elementwise:
    made = Elementwise(
        context.device.launcher, sizes.heads, sizes.hidden, sizes.heads.head_dim, 1e-5, torch.bfloat16, kv_dtype,
        PAGE_TOKENS, context.torch_device,
    )  # fmt: skip
    context.device.launcher.prepare(made.kernels)
    return made


def _traffic(work: Callable[[], object], num_bytes: float) -> PreparedCase:
    """A case whose amount is the bytes that the kernel must read and write, each once."""
    return PreparedCase([work], num_bytes, "TB/s", leads_with_time=True)


def _caches(context: DeviceContext, layout: CacheLayout, count: int) -> list[Tensor]:
    caches = [torch.empty(layout.num_bytes, dtype=torch.uint8, device=context.torch_device) for _ in range(count)]
    for cache in caches:
        fill_cache(cache, layout)
    return caches


def _shuffled_pages(context: DeviceContext, num_rows: int, pages_per_row: int) -> Tensor:
    """int32 [rows, pages] page table of distinct pages in random order."""
    pages = np.random.default_rng(0).permutation(num_rows * pages_per_row).astype(np.int32)
    return torch.from_numpy(pages.reshape(num_rows, pages_per_row)).to(context.torch_device)
