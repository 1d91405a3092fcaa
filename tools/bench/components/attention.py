"""`penstock bench attention`: decode attention on the CPU against reading the keys and values once.

It measures decode steps of thin decoders: their linears are small, and the keys and values of all layers are larger
than the CPU's caches. Between two steps the same threads read the memory of the whole cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from cyclopts import Parameter

from penstock.backend.checkpoint.decoder_config import DecoderConfig, RopeConfig
from penstock.backend.checkpoint.tensors import LayerWeights
from penstock.backend.errors import StartupError
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass, make_cpu_ops
from penstock.backend.passes.decoder.cpu.native_ops import NativeOps, TimedOperations
from penstock.backend.passes.decoder.cpu.native_structs import OperationKind
from penstock.backend.passes.decoder.ops import KV_BLOCK_BYTES, KV_BLOCK_VALUES
from penstock.tools.bench.harness.decode_steps import commit_cache, decode_steps
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions, Sizes

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

_PAGE_TOKENS = 32
_MAX_LAYERS = 64
_WIDTH = 32
"""Hidden size, MLP and vocabulary of the models, which only differ in their heads."""
_READ_BYTES = 512
"""`WeightPacker.read_memory` reads multiples of this."""
_WARM_UP_ROUNDS = 1
AIM = 0.7


@MEASUREMENT
@dataclass(frozen=True)
class AttentionOptions:
    contexts: Sizes = (1024, 8192, 32_768)
    """Contexts of a sequence, in tokens."""

    rows: Counts = (1, 8)
    """Sequences that decode together."""

    groups: Counts = (1, 3, 4, 8)
    """Query heads for each head of keys and values."""

    kv_dtypes: Annotated[tuple[Literal["fp32", "bf16", "q8_0"], ...], Parameter(negative="", show_default=" ".join)] = (
        "fp32",
        "bf16",
        "q8_0",
    )
    """Types of the cache."""

    kv_heads: AtLeastOne = 4
    """Heads of keys and values."""

    head_dim: AtLeastOne = 64
    """Width of a head."""

    cache_mib: AtLeastOne = 256
    """Least memory of all keys and values. It must be several times the CPU's caches."""

    rounds: AtLeastOne = 5
    """Steps of each point."""

    cpu_path: str = "auto"
    """Instruction set of the kernels, as for the backend."""


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """Medians of the rounds."""

    kv_dtype: str
    group: int
    context_tokens: int
    rows: int
    attention_gb_per_s: float
    """Size of all keys and values, each read once, divided by the time of the attention of all layers."""
    read_gb_per_s: float
    share: float
    """Median of the rounds' ratios."""


def attention(*, options: AttentionOptions = AttentionOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run:
        points = []
        for kv_dtype in options.kv_dtypes:
            for group in options.groups:
                for context in options.contexts:
                    for rows in options.rows:
                        with run.status(f"{kv_dtype}, groups of {group}, {rows} rows of {context:,} tokens"):
                            points.append(measure(options, kv_dtype, group, context, rows))
        run.add("attention", points, attention_table(points, options), attention_aims(points))
    return run.exit_status


def measure(options: AttentionOptions, kv_dtype: str, group: int, context_tokens: int, rows: int) -> AttentionPoint:
    """Raises StartupError."""
    values = rows * (context_tokens + 1) * 2 * options.kv_heads * options.head_dim
    layer_bytes = values * KV_BLOCK_BYTES[kv_dtype] // KV_BLOCK_VALUES
    num_layers = min(_MAX_LAYERS, -(-(options.cache_mib << 20) // layer_bytes))
    forward_pass, ops = load_thin_decoder(options, group, num_layers, context_tokens + 1, rows)
    with closing(forward_pass):
        forward_pass.create_cache(rows * -(-(context_tokens + 1) // _PAGE_TOKENS), _PAGE_TOKENS, kv_dtype)
        commit_cache(ops)
        memory = [floats_of(layer) for layer in ops.cache]
        attention_speeds, read_speeds = [], []
        for batch in decode_steps(rows, context_tokens, _PAGE_TOKENS, _WARM_UP_ROUNDS + options.rounds):
            timed: list[TimedOperations] = []
            ops.timed = timed
            forward_pass.forward(batch)
            attention_speeds.append(num_layers * layer_bytes / attention_s(timed) / 1e9)
            started_s = time.perf_counter()
            for part in memory:
                ops.weights.read_memory(part)
            read_speeds.append(sum(part.nbytes for part in memory) / (time.perf_counter() - started_s) / 1e9)
    pairs = list(zip(attention_speeds, read_speeds, strict=True))[_WARM_UP_ROUNDS:]
    return AttentionPoint(
        kv_dtype,
        group,
        context_tokens,
        rows,
        attention_gb_per_s=statistics.median(attention for attention, _ in pairs),
        read_gb_per_s=statistics.median(read for _, read in pairs),
        share=statistics.median(attention / read for attention, read in pairs),
    )


def attention_s(timed: Sequence[TimedOperations]) -> float:
    nanoseconds: int = sum(
        taken.elapsed_ns
        for run in timed
        for operation, taken in zip(run.operations, run.times, strict=True)
        if operation.kind == OperationKind.ATTENTION
    )
    return nanoseconds / 1e9


def floats_of(memory: Tensor) -> Tensor:
    whole = memory.flatten()
    return whole[: len(whole) // _READ_BYTES * _READ_BYTES].view(torch.float32)


def load_thin_decoder(
    options: AttentionOptions, group: int, num_layers: int, max_context_tokens: int, max_rows: int
) -> tuple[CpuDecoderPass, NativeOps]:
    """Raises StartupError."""
    dim = options.head_dim
    config = DecoderConfig(
        architecture="thin",
        vocab_size=_WIDTH,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_layers=num_layers,
        num_heads=group * options.kv_heads,
        num_kv_heads=options.kv_heads,
        head_dim=dim,
        norm_eps=1e-5,
        max_context_tokens=max_context_tokens,
        rope=RopeConfig(dim, tuple(1e4 ** (-2 * i / dim) for i in range(dim // 2))),
        tie_embeddings=True,
    )
    ops = make_cpu_ops(config, torch.bfloat16, max_rows, options.cpu_path)
    if not isinstance(ops, NativeOps):
        raise StartupError("attention is measured with the native kernels, which cannot run here")
    return CpuDecoderPass(config, ThinWeights(config), ops, torch.bfloat16, max_rows), ops


class ThinWeights:
    """The weights of a decoder that does nothing: all are 0, except that norms keep their input."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config

    def embedding(self, dtype: torch.dtype) -> Tensor:
        return self._zeros(_WIDTH, _WIDTH, dtype)

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor]:  # noqa: ARG002 - all are the same
        config = self._config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return LayerWeights(
            qkv=self._zeros(heads + 2 * kv_heads, _WIDTH, dtype),
            o=self._zeros(_WIDTH, heads, dtype),
            gate_up=self._zeros(2 * _WIDTH, _WIDTH, dtype),
            down=self._zeros(_WIDTH, _WIDTH, dtype),
            attention_norm=self.final_norm(dtype),
            mlp_norm=self.final_norm(dtype),
        )

    def final_norm(self, dtype: torch.dtype) -> Tensor:
        return torch.ones(_WIDTH, dtype=dtype)

    def lm_head(self, dtype: torch.dtype) -> Tensor | None:  # noqa: ARG002 - it is the embedding
        return None

    def _zeros(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, columns, dtype=dtype)


def attention_aims(points: Sequence[AttentionPoint]) -> list[Aim]:
    """One aim for each type and group: the point with the least share."""
    kinds = dict.fromkeys((point.kv_dtype, point.group) for point in points)
    aims = []
    for kv_dtype, group in kinds:
        least = min(point.share for point in points if (point.kv_dtype, point.group) == (kv_dtype, group))
        aims.append(Aim(f"attention / reading, {kv_dtype}, groups of {group}, least", least, "at least", AIM))
    return aims


def attention_table(points: Sequence[AttentionPoint], options: AttentionOptions) -> Table:
    title = f"Decode attention, {options.kv_heads} heads of keys and values of {options.head_dim}"
    columns = ("cache", "query heads\n/ head", "context", "rows", "attention\nGB/s", "reading\nGB/s", "ratio")
    table = make_table(title, *columns)
    for point in points:
        table.add_row(
            point.kv_dtype,
            str(point.group),
            f"{point.context_tokens:,}",
            str(point.rows),
            f"{point.attention_gb_per_s:.1f}",
            f"{point.read_gb_per_s:.1f}",
            f"{point.share:.2f} ×",
        )
    return table
