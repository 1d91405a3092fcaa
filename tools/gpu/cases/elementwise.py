"""Norms, rotary embedding, cache writes, gates, gathers and page copies, checked against float64.

Bits must be equal where nothing is rounded. Memory that a kernel must not touch is poisoned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.backend.forward_pass import FROM_EMBEDDINGS, FROM_SLOT
from penstock.backend.passes.cpu.in_torch.paged_cache import quantise_q8_0
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import copy_pages
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.cuda.step.step_rows import RowArrays as Rows
from penstock.backend.passes.ops.interface import HeadShape, supports_q8_0
from penstock.tools.gpu.cases.check import Check, check_of, require, require_close, require_same_bits, require_within

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EPS = 1e-5
HEADS = HeadShape(2, 1, 64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(
    launcher: Launcher,
    dtype: torch.dtype = torch.float32,
    heads: HeadShape = HEADS,
    hidden: int = 64,
    rotary_dim: int = 64,
    kv_dtype: str = "fp32",
    page_size: int = 16,
    *,
    ropes_by_token: bool = False,
) -> Elementwise:
    settings = heads, hidden, rotary_dim, EPS, dtype, kv_dtype, page_size, torch.device("cpu")
    return Elementwise(launcher, *settings, ropes_by_token=ropes_by_token)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def check_close(what: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Check within the dtype's precision. Returns the error as a share of the tolerance."""
    return require_close(what, found, expected, TOLERANCE[dtype], 0.1 * TOLERANCE[dtype])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


@dataclass
class StoreCase:
    """A step with a decode row at a page's end, a padding row, a chunk across pages, and a new sequence's row."""

    heads: HeadShape
    kv_dtype: str
    page_size: int
    rotary_dim: int
    has_axes: bool = False

    def __post_init__(self) -> None:
        self.layout = CacheLayout(2, 11, self.page_size, self.heads.num_kv_heads, self.heads.head_dim, self.kv_dtype)
        size = self.page_size
        self.rows = Rows(ints(0, 1, 2, 2 + size, 7 + size), ints(size - 1, 0, size - 3, 0), ints(3, -1, 0, 5))
        self.page_table = torch.full((6, 4), 10**6, dtype=torch.int32)
        self.page_table[3, 0] = 7
        self.page_table[0, :2] = ints(2, 9)
        self.page_table[5, 0] = 4
        self.num_tokens = 7 + size

    def places(self) -> list[tuple[int, int, int]]:
        """The written KV slots, as (token, page, place)."""
        found = []
        for row, slot in enumerate(self.rows.slots.tolist()):
            first, end = self.rows.query_starts[row : row + 2].tolist()
            for token in range(first, end) if slot >= 0 else ():
                page, place = divmod(int(self.rows.context_lens[row]) + token - first, self.page_size)
                found.append((token, int(self.page_table[slot, page]), place))
        return found

    def positions(self) -> Tensor:
        starts, contexts = self.rows.query_starts.tolist(), self.rows.context_lens.tolist()
        return torch.cat([torch.arange(c, c + e - s) for c, s, e in zip(contexts, starts, starts[1:], strict=False)])

    def read(self, layer: Tensor, which: int, page: int, place: int) -> tuple[Tensor, Tensor]:
        """Numbers [num_kv_heads, head_dim] in the cache's dtype; for q8_0 also scales [num_kv_heads, head_dim / 32]."""
        dim, heads = self.heads.head_dim, self.heads.num_kv_heads
        blocks = layer.view(self.layout.num_pages, 2, heads, self.layout.block_bytes)[page, which]
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "q8_0": torch.int8, "fp8": torch.float8_e4m3fn}
        number = dtypes[self.kv_dtype]
        cut = self.page_size * dim * number.itemsize
        numbers = blocks[:, :cut].contiguous().view(number).view(heads, self.page_size, dim)[:, place]
        scales = blocks[:, cut:].contiguous().view(torch.float16).view(heads, self.page_size, -1)[:, place]
        return numbers, scales


def expected_heads(
    qkv: Tensor,
    case: StoreCase,
    rope: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    query_factor: float = 1.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Expected q, k and v, [T, heads, head_dim]; rounded to the dtype after the norm, as separate operations would.

    q is rotated by query_factor times rope.
    """
    shape = case.heads
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if norms is not None:
        if norms[0].dim() > 1:  # layer norms, with a weight for each head
            q, k = (x.double() - x.double().mean(dim=-1, keepdim=True) for x in (q, k))
        q, k = (rms_norm(x, weight).to(qkv.dtype) for x, weight in zip((q, k), norms, strict=True))
    if rope is not None:
        turned = []
        for part, table in ((q.double(), query_factor * rope), (k.double(), rope)):
            places = range(len(qkv)) if case.has_axes else case.positions()
            cos, sin = table.double()[places].unsqueeze(1).chunk(2, dim=-1)
            half = case.rotary_dim // 2
            x, y, rest = torch.split(part, [half, half, shape.head_dim - case.rotary_dim], dim=-1)
            turned.append(torch.cat([x * cos - y * sin, y * cos + x * sin, rest], dim=-1))
        q, k = turned
    return q, k, v


def rope_rows(num_positions: int, rotary_dim: int) -> Tensor:
    angles = torch.outer(torch.arange(num_positions), 10000.0 ** -(torch.arange(rotary_dim // 2) / rotary_dim * 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def check_store(
    launcher: Launcher,
    case: StoreCase,
    dtype: torch.dtype,
    *,
    rotates: bool = True,
    norms: bool = False,
    centres: bool = False,
) -> float:
    """Check the stored and rotated values and the untouched memory. Returns the error of the queries.

    centres: layer norms with a weight for each head, of heads whose mean is not 0.
    """
    torch.manual_seed(case.heads.head_dim)
    sizes = case.heads, 64, case.rotary_dim, case.kv_dtype, case.page_size
    elementwise = make(launcher, dtype, *sizes, ropes_by_token=case.has_axes)
    qkv = torch.randn(case.num_tokens, case.heads.qkv_size)
    qkv += 0.5 * centres
    qkv[2] *= 1e-3  # small, so that the norms' eps dominates
    qkv = qkv.to(dtype)
    rope = rope_rows(3 * case.page_size, case.rotary_dim) if rotates else None
    if rope is not None and case.has_axes:
        positions, axes = torch.randint(len(rope), (len(qkv), 3)).int(), torch.arange(case.rotary_dim // 2).int() % 3
        expected = rope.gather(0, positions.long()[:, axes.repeat(2)])
        elementwise.turn_tokens(rope, positions, axes, rope := poisoned(*expected.shape, dtype=torch.float32))
        require_same_bits("the positions' cosines and sines", rope, expected)
    q_sizes, k_sizes = (
        [n, case.heads.head_dim][1 - centres :] for n in (case.heads.num_heads, case.heads.num_kv_heads)
    )
    weights = (torch.rand(q_sizes) + 0.5, torch.rand(k_sizes) + 0.5) if norms else None
    cache = torch.full((case.layout.num_bytes,), 0xFF, dtype=torch.uint8)
    layer = cache[case.layout.layer_bytes :]
    before = qkv.clone()
    q, k, v = expected_heads(qkv, case, rope, weights)
    query_rope = None if rope is None else 1.5 * rope
    elementwise.rope_and_store(
        qkv, layer, case.page_table, case.rows, rope, weights, query_rope, has_layer_norms=centres
    )

    written = [token for token, _, _ in case.places()]
    size = case.heads.output_size
    require_same_bits("keys and values of the step", qkv[:, size:], before[:, size:])
    require_same_bits("the padding row", qkv[1], before[1])
    # A norm that is rounded to the other side changes a rotated number by a share of its head's size, not of its own.
    head_sizes = q[written].double().abs().amax(dim=-1, keepdim=True)
    found = qkv[written, :size].view(len(written), -1, case.heads.head_dim).double() / head_sizes
    error = require_close("queries", found, q[written] / head_sizes, TOLERANCE[dtype], 0.5 * TOLERANCE[dtype])
    untouched = layer.clone().view(case.layout.num_pages, 2, case.heads.num_kv_heads, -1)
    for token, page, place in case.places():
        for which, heads in ((0, k[token]), (1, v[token])):
            numbers, scales = case.read(layer, which, page, place)
            check_stored(case.kv_dtype, numbers, scales, heads, dtype, exact=which == 1)
            rows = untouched[page, which]
            width = case.heads.head_dim * numbers.element_size()
            rows[:, place * width : (place + 1) * width] = 0xFF
            if scales.numel():
                start = case.page_size * width + place * scales.shape[1] * 2
                rows[:, start : start + scales.shape[1] * 2] = 0xFF
    require("a KV slot that belongs to no row was written", bool((untouched == 0xFF).all()))
    require("another layer was written", bool((cache[: case.layout.layer_bytes] == 0xFF).all()))
    return error


def check_stored(
    kv_dtype: str, numbers: Tensor, scales: Tensor, heads: Tensor, dtype: torch.dtype, *, exact: bool
) -> None:
    """Check stored numbers against heads [num_kv_heads, head_dim]. exact: heads are the input, so bits must match."""
    if kv_dtype == "q8_0":
        expected, expected_scales = quantise_q8_0(heads.to(dtype))
        if exact:
            require_same_bits("quantised numbers", numbers, expected.flatten(1))
            require_same_bits("scales", scales, expected_scales.squeeze(-1))
        read = numbers.view(expected.shape).float() * scales.unsqueeze(-1).float()
        error = float((read.flatten(1) - heads).abs().max())
        require_within("quantised numbers", error, 0.6 * float(scales.max()) + TOLERANCE[dtype])
    elif kv_dtype == "fp8":
        if exact:
            require_same_bits("fp8", numbers, heads.float().clamp(-448, 448).to(torch.float8_e4m3fn))
        require("fp8", bool(((numbers.double() - heads).abs() <= 2**-9 + 0.07 * heads.abs()).all()))
    elif exact and (kv_dtype == "fp32" or dtype == torch.bfloat16):
        require("stored values differ from the step's", torch.equal(numbers.double(), heads.double()))
    else:
        check_close("stored numbers", numbers, heads, torch.bfloat16 if kv_dtype == "bf16" else dtype)
        if kv_dtype == "fp32":
            require_same_bits("keys rounded to the step's dtype", numbers, numbers.to(dtype).float())


def check_norm(launcher: Launcher, dtype: torch.dtype, hidden: int) -> float:
    """Check the norm of a sum, with a row in which eps dominates and a row of zeros."""
    torch.manual_seed(hidden)
    sizes = torch.tensor([1.0, 1e-3, 1.0, 0.0, 1.0]).unsqueeze(1)
    residual, delta = torch.randn(5, hidden) * sizes, (torch.randn(5, hidden) * sizes).to(dtype)
    weight = torch.randn(hidden)
    out, summed = poisoned(5, hidden, dtype=dtype), residual + delta.float()
    make(launcher, dtype, hidden=hidden).add_rms_norm(residual, delta, weight, out)
    require_same_bits("the sum", residual, summed)
    return check_close("the norm", out, rms_norm(summed, weight), dtype)


def check_layer_norm(launcher: Launcher, dtype: torch.dtype, hidden: int) -> float:
    """Check the layer norm of a sum, with a row whose mean is far from 0 and a row of equal numbers."""
    torch.manual_seed(hidden)
    residual, delta = torch.randn(4, hidden), torch.randn(4, hidden).to(dtype)
    residual[1] += 5
    residual[2], delta[2] = 3.0, 0.0
    weight = torch.randn(2 * hidden)
    out, summed = poisoned(4, hidden, dtype=dtype), residual + delta.float()
    make(launcher, dtype, hidden=hidden).add_layer_norm(residual, delta, weight, out)
    require_same_bits("the sum", residual, summed)
    scale, bias = weight.double().chunk(2)
    expected = torch.nn.functional.layer_norm(summed.double(), (hidden,), scale, bias, EPS)
    return check_close("the layer norm", out, expected, dtype)


def check_added_norm(launcher: Launcher, dtype: torch.dtype, hidden: int) -> float:
    """Check the residual stream after the norm of an addend, with an addend in which eps dominates."""
    torch.manual_seed(hidden)
    residual, weight = torch.randn(3, hidden), torch.randn(hidden)
    added = (torch.randn(3, hidden) * torch.tensor([[1.0], [1e-3], [30.0]])).to(dtype)
    expected, scaled = residual.double() + rms_norm(added, weight), residual.clone()
    kernels = make(launcher, dtype, hidden=hidden)
    kernels.rms_norm_added(residual, added, weight)
    kernels.rms_norm_added(scaled, added, torch.cat([weight, torch.tensor([0.7])]))
    check_close("the residual stream, scaled", scaled, 0.7 * expected, torch.float32)
    return check_close("the residual stream", residual, expected, torch.float32)


def check_norm_of_all_heads(launcher: Launcher, dtype: torch.dtype, heads: HeadShape) -> float:
    """Check q and k, and that v does not change."""
    torch.manual_seed(heads.num_heads)
    q_size, k_size = heads.output_size, heads.num_kv_heads * heads.head_dim
    qkv = torch.randn(3, heads.qkv_size).to(dtype)
    qkv[1] *= 1e-3
    before, weights = qkv.clone(), (torch.randn(q_size), torch.randn(k_size))
    make(launcher, dtype, heads).norm_q_and_k(qkv, *weights)
    q, k, v = torch.split(before, [q_size, k_size, k_size], dim=1)
    require_same_bits("v", qkv[:, -k_size:], v)
    expected = torch.cat([rms_norm(q, weights[0]), rms_norm(k, weights[1])], dim=1)
    return check_close("q and k", qkv[:, : q_size + k_size], expected, dtype)


def check_gelu(launcher: Launcher, dtype: torch.dtype, size: int) -> float:
    torch.manual_seed(2)
    x = torch.randn(3, size) * 4
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -30.0])
    x, out = x.to(dtype), poisoned(3, size, dtype=dtype)
    make(launcher, dtype).gelu(x, out)
    return check_close("gelu", out, torch.nn.functional.gelu(x.double(), approximate="tanh"), dtype)


def check_gate(launcher: Launcher, dtype: torch.dtype, name: str, size: int) -> float:
    """name: silu_mul or gelu_mul."""
    torch.manual_seed(1)
    gate_up = torch.randn(3, 2 * size) * 4
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -30.0])
    gate_up, out = gate_up.to(dtype), poisoned(3, size, dtype=dtype)
    getattr(make(launcher, dtype), name)(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=-1)
    functional = torch.nn.functional
    activated = functional.silu(gate) if name == "silu_mul" else functional.gelu(gate, approximate="tanh")
    return check_close(name, out, activated * up, dtype)


def check_gates(launcher: Launcher, dtype: torch.dtype, size: int) -> float:
    """Check results times sigmoids, and GELUs times inputs of chosen tokens; both read columns of wider rows."""
    torch.manual_seed(3)
    wide, x = 4 * torch.randn(5, 3 * size), torch.randn(2, 2, size).to(dtype)
    gates, kernels, own = wide[:2].to(dtype)[:, size : 2 * size], make(launcher, dtype), slice(size, 2 * size)
    expected = x[0].double() * gates.double().sigmoid()
    kernels.sigmoid_mul(gates, x[0])
    check_close("gated results", x[0], expected, dtype)
    for tokens in (None, ints(4, 2)):
        found = x[1].clone()
        expected = (
            torch.nn.functional.gelu(found.double(), approximate="tanh")
            * wide[[0, 1] if tokens is None else tokens][:, own]
        )
        kernels.gelu_mul_input(found, wide[:, own], tokens)
        error = check_close("gated inputs", found, expected, dtype)
    return error


def check_embedding(launcher: Launcher, dtype: torch.dtype, hidden: int) -> None:
    """Check last tokens of slots, zeros for invalid tokens, and a row that is already filled in."""
    table, residual = torch.randn(50, hidden).to(dtype), poisoned(8, hidden, dtype=torch.float32)
    rows = Rows(ints(0, 1, 2, 3, 8), ints(0, 0, 0, 0), ints(2, 0, -1, 1))
    input_ids = ints(FROM_SLOT, 49, FROM_SLOT, 50, -7, 0, FROM_EMBEDDINGS, FROM_SLOT)
    residual[6] = given = torch.randn(hidden)
    make(launcher, dtype, hidden=hidden).embed(table, input_ids, rows, ints(10**9, 13, 7), residual)
    looked_up = [table[7], table[49], *[torch.zeros_like(table[0])] * 3, table[0]]
    expected = torch.stack([*(row.float() for row in looked_up), given, table[13].float()])
    require_same_bits("the embeddings", residual, expected)


def check_gather(launcher: Launcher, dtype: torch.dtype) -> None:
    """Check gathered rows; padding rows must stay unchanged."""
    source = torch.randn(9, 2080).to(dtype)
    out = torch.full((4, 2064), 5.0, dtype=dtype)
    make(launcher).gather_rows(source, ints(8, 0, -1, 3), out[:, :2056])
    expected = torch.full_like(out, 5.0)
    expected[[0, 1, 3], :2056] = source[[8, 0, 3], :2056]
    require_same_bits("the gathered rows", out, expected)


def check_page_copies(launcher: Launcher, kv_dtype: str) -> None:
    """Check that the pages are copied in all layers and nothing else changes."""
    layout = CacheLayout(3, 6, 16, 2, 160, kv_dtype)
    cache = torch.randint(0, 256, (layout.num_bytes,), dtype=torch.uint8).view(3, 6, -1)
    expected = cache.clone()
    expected[:, 5], expected[:, 0] = cache[:, 2], cache[:, 4]
    pairs = ints(2, 5, -1, -1, 4, 0, -1, 1, 3, -1).view(5, 2)
    copy_pages(launcher, cache, cache, pairs)
    require_same_bits("the cache", cache, expected)


def wide_checks() -> Iterator[Check]:
    return _checks(DTYPES, (16, 32, 64), (64, 80, 96, 128, 256), (8, 72, 1024, 4104, 16384))


def small_checks() -> Iterator[Check]:
    return _checks({"bf16": torch.bfloat16}, (16,), (96,), (72,))


def _checks(
    dtypes: dict[str, torch.dtype], page_sizes: tuple[int, ...], head_dims: tuple[int, ...], widths: tuple[int, ...]
) -> Iterator[Check]:
    for name, dtype in dtypes.items():
        for hidden in widths:
            yield check_of("norm", f"{name}.{hidden}", check_norm, dtype=dtype, hidden=hidden)
            yield check_of("norm", f"layer.{name}.{hidden}", check_layer_norm, dtype=dtype, hidden=hidden)
            yield check_of("norm", f"added.{name}.{hidden}", check_added_norm, dtype=dtype, hidden=hidden)
            yield check_of("embed", f"{name}.{hidden}", check_embedding, dtype=dtype, hidden=hidden)
        for gate in ("silu_mul", "gelu_mul"):
            yield check_of("gate", f"{gate}.{name}", check_gate, dtype=dtype, name=gate, size=1032)
        yield check_of("gate", f"gelu.{name}", check_gelu, dtype=dtype, size=1032)
        yield check_of("gate", f"beside.{name}", check_gates, dtype=dtype, size=1032)
        for heads in (HeadShape(7, 1, 64), HeadShape(32, 8, 128)):
            yield check_of("norm", f"heads.{name}.{heads.num_heads}", check_norm_of_all_heads, dtype=dtype, heads=heads)
        yield check_of("gather", name, check_gather, dtype=dtype)
        for kv_dtype in KV_MACRO:
            for number, head_dim in enumerate(head_dims):
                if kv_dtype == "q8_0" and not supports_q8_0(head_dim):
                    continue
                page_size, heads = page_sizes[number % len(page_sizes)], HeadShape(7, 1, head_dim)
                sizes = (heads, kv_dtype, page_size, head_dim)
                yield check_of("rope_and_store", f"{name}.{kv_dtype}.{head_dim}", _store, dtype=dtype, sizes=sizes)
    for kv_dtype in ("q8_0", "bf16"):
        yield check_of("copy_pages", kv_dtype, check_page_copies, kv_dtype=kv_dtype)


def _store(launcher: Launcher, dtype: torch.dtype, sizes: tuple[HeadShape, str, int, int]) -> float:
    check_store(launcher, StoreCase(*sizes), dtype, norms=True, centres=True)
    check_store(launcher, StoreCase(*sizes, has_axes=True), dtype)
    return check_store(launcher, StoreCase(*sizes), dtype, norms=True)
