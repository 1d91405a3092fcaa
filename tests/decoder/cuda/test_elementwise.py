"""The elementwise kernels on the emulator, against float64, torch's dtypes and the CPU's q8_0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.forward_pass import FROM_SLOT
from backend.passes.decoder.cuda.cache_layout import KV_MACRO, CacheLayout
from backend.passes.decoder.cuda.elementwise import Elementwise, refusal
from backend.passes.decoder.kv_torch import quantise
from backend.passes.decoder.ops import HeadShape
from tests.cuda_emulator import EmulatedLauncher

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LAUNCHERS = {
    "fast": EmulatedLauncher(),
    "forward": EmulatedLauncher("check", "forward"),
    "reverse": EmulatedLauncher("check", "reverse"),
    "random": EmulatedLauncher("check", "random", 3),
}
EPS = 1e-5
HEADS = HeadShape(2, 1, 64)


@dataclass
class Rows:
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> EmulatedLauncher:
    return LAUNCHERS[request.param]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(
    launcher: EmulatedLauncher,
    dtype: torch.dtype = torch.float32,
    heads: HeadShape = HEADS,
    hidden: int = 64,
    rotary_dim: int = 64,
    kv_dtype: str = "fp32",
    page_size: int = 16,
) -> Elementwise:
    device = torch.device("cpu")
    return Elementwise(launcher, heads, hidden, rotary_dim, EPS, dtype, kv_dtype, page_size, device)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=0.1 * tolerance)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


# ---- Norms ----


@pytest.mark.parametrize("hidden", [8, 72, 1024, 4104])
def test_the_norm_of_the_sum_agrees_with_float64(dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(hidden)
    residual, delta, weight = torch.randn(5, hidden), torch.randn(5, hidden).to(dtype), torch.randn(hidden)
    out, summed = poisoned(5, hidden, dtype=dtype), residual + delta.float()
    make(LAUNCHERS["fast"], dtype, hidden=hidden).add_rms_norm(residual, delta, weight, out)
    assert torch.equal(residual, summed)
    assert_close(out, rms_norm(summed, weight), dtype)


def test_the_widest_norm_fits_a_block() -> None:
    residual, weight = torch.randn(1, 16384), torch.randn(16384)
    out = poisoned(1, 16384, dtype=torch.float32)
    make(LAUNCHERS["fast"], hidden=16384).add_rms_norm(residual, None, weight, out)
    assert_close(out, rms_norm(residual, weight), torch.float32)


def test_a_norm_without_a_delta_leaves_the_residual(launcher: EmulatedLauncher) -> None:
    residual, weight = torch.randn(2, 264), torch.randn(264)
    before, out = residual.clone(), poisoned(2, 264, dtype=torch.bfloat16)
    make(launcher, torch.bfloat16, hidden=264).add_rms_norm(residual, None, weight, out)
    assert torch.equal(residual, before)
    assert_close(out, rms_norm(before, weight), torch.bfloat16)


def test_a_norm_does_not_depend_on_the_other_rows() -> None:
    residual, weight = torch.randn(7, 512) * 10, torch.randn(512)
    together, alone = poisoned(7, 512, dtype=torch.float32), poisoned(1, 512, dtype=torch.float32)
    elementwise = make(LAUNCHERS["fast"], hidden=512)
    elementwise.add_rms_norm(residual, None, weight, together)
    elementwise.add_rms_norm(residual[4:5].clone(), None, weight, alone)
    assert torch.equal(together[4], alone[0])


# ---- RoPE and the write to the cache ----


@dataclass
class StoreCase:
    """A decode row at a page's end, a padding row, a chunk across pages, and a row that begins."""

    heads: HeadShape
    kv_dtype: str
    page_size: int
    rotary_dim: int

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
        """(token, page, place) of what is written."""
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
        """Numbers [num_kv_heads, head_dim] in the cache's dtype and, of q8_0, scales [num_kv_heads, head_dim / 32]."""
        dim, heads = self.heads.head_dim, self.heads.num_kv_heads
        blocks = layer.view(self.layout.num_pages, 2, heads, self.layout.block_bytes)[page, which]
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "q8_0": torch.int8, "fp8": torch.float8_e4m3fn}
        number = dtypes[self.kv_dtype]
        cut = self.page_size * dim * number.itemsize
        numbers = blocks[:, :cut].contiguous().view(number).view(heads, self.page_size, dim)[:, place]
        scales = blocks[:, cut:].contiguous().view(torch.float16).view(heads, self.page_size, -1)[:, place]
        return numbers, scales


def expected_heads(
    qkv: Tensor, case: StoreCase, rope: Tensor | None, norms: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64, [T, heads, head_dim], rounded to the dtype as between separate operations."""
    shape = case.heads
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if norms is not None:
        q, k = (rms_norm(x, weight).to(qkv.dtype) for x, weight in zip((q, k), norms, strict=True))
    if rope is not None:
        cos, sin = rope.double()[case.positions()].unsqueeze(1).chunk(2, dim=-1)
        turned = []
        for part in (q.double(), k.double()):
            x, y, rest = part.split([case.rotary_dim // 2, case.rotary_dim // 2, shape.head_dim - case.rotary_dim], -1)
            turned.append(torch.cat([x * cos - y * sin, y * cos + x * sin, rest], dim=-1))
        q, k = turned
    return q, k, v


def rope_rows(num_positions: int, rotary_dim: int) -> Tensor:
    angles = torch.outer(torch.arange(num_positions), 10000.0 ** -(torch.arange(rotary_dim // 2) / rotary_dim * 2))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def check_store(
    launcher: EmulatedLauncher, case: StoreCase, dtype: torch.dtype, *, rotates: bool = True, norms: bool = False
) -> None:
    torch.manual_seed(case.heads.head_dim)
    elementwise = make(launcher, dtype, case.heads, 64, case.rotary_dim, case.kv_dtype, case.page_size)
    qkv = torch.randn(case.num_tokens, case.heads.qkv_size).to(dtype)
    rope = rope_rows(3 * case.page_size, case.rotary_dim) if rotates else None
    weights = (torch.rand(case.heads.head_dim) + 0.5, torch.rand(case.heads.head_dim) + 0.5) if norms else None
    cache = torch.full((case.layout.num_bytes,), 0xFF, dtype=torch.uint8)
    layer = cache[case.layout.layer_bytes :]
    before = qkv.clone()
    q, k, v = expected_heads(qkv, case, rope, weights)
    elementwise.rope_and_store(qkv, layer, case.page_table, case.rows, rope, weights)

    written = [token for token, _, _ in case.places()]
    size = case.heads.output_size
    assert torch.equal(qkv[:, size:], before[:, size:])
    assert torch.equal(qkv[1], before[1])  # the padding row's
    assert_close(qkv[written, :size], q.flatten(1)[written], dtype)
    untouched = layer.clone().view(case.layout.num_pages, 2, case.heads.num_kv_heads, -1)
    for token, page, place in case.places():
        for which, heads in ((0, k[token]), (1, v[token])):
            numbers, scales = case.read(layer, which, page, place)
            assert_stored(case.kv_dtype, numbers, scales, heads, dtype, exact=which == 1)
            rows = untouched[page, which]
            width = case.heads.head_dim * numbers.element_size()
            rows[:, place * width : (place + 1) * width] = 0xFF
            if scales.numel():
                start = case.page_size * width + place * scales.shape[1] * 2
                rows[:, start : start + scales.shape[1] * 2] = 0xFF
    assert (untouched == 0xFF).all(), "something else was written"
    assert (cache[: case.layout.layer_bytes] == 0xFF).all()


def assert_stored(
    kv_dtype: str, numbers: Tensor, scales: Tensor, heads: Tensor, dtype: torch.dtype, *, exact: bool
) -> None:
    """heads [num_kv_heads, head_dim]. exact: they are what was handed in, and so every bit is known."""
    if kv_dtype == "q8_0":
        expected, expected_scales = quantise(heads.to(dtype))
        if exact:
            assert torch.equal(numbers, expected.flatten(1))
            assert torch.equal(scales, expected_scales.squeeze(-1))
        read = numbers.view(expected.shape).float() * scales.unsqueeze(-1).float()
        assert (read.flatten(1) - heads).abs().max() <= 0.6 * float(scales.max()) + TOLERANCE[dtype]
    elif kv_dtype == "fp8":
        if exact:
            expected = heads.float().clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
        assert ((numbers.double() - heads).abs() <= 2**-9 + 0.07 * heads.abs()).all()
    elif exact and (kv_dtype == "fp32" or dtype == torch.bfloat16):
        assert torch.equal(numbers.double(), heads.double())
    else:
        assert_close(numbers, heads, torch.bfloat16 if kv_dtype == "bf16" else dtype)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_each_dtype_is_stored_in_each_cache(dtype: torch.dtype, kv_dtype: str) -> None:
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(4, 2, 64), kv_dtype, 16, 64), dtype, norms=True)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_heads_and_pages_of_all_sizes_are_stored(head_dim: int, page_size: int) -> None:
    kv_dtype = "fp8" if head_dim == 80 else "q8_0"
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(7, 1, head_dim), kv_dtype, page_size, head_dim), torch.bfloat16)


@pytest.mark.parametrize("rotary_dim", [16, 48, 128])
def test_rope_may_turn_a_part_of_a_head(rotary_dim: int) -> None:
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(3, 3, 128), "fp32", 16, rotary_dim), torch.float32, norms=True)


def test_a_layer_may_go_without_rope(dtype: torch.dtype) -> None:
    check_store(LAUNCHERS["fast"], StoreCase(HeadShape(2, 1, 64), "fp32", 16, 64), dtype, rotates=False)


@pytest.mark.parametrize("kv_dtype", KV_MACRO)
def test_storing_has_no_races_and_stays_in_bounds(launcher: EmulatedLauncher, kv_dtype: str) -> None:
    check_store(launcher, StoreCase(HeadShape(2, 1, 96), kv_dtype, 16, 96), torch.bfloat16, norms=True)


def store_values(values: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """What becomes of one value vector [head_dim]."""
    case = StoreCase(HeadShape(1, 1, len(values)), kv_dtype, 16, 16)
    qkv = torch.zeros(1, 3 * len(values), dtype=values.dtype)
    qkv[0, 2 * len(values) :] = values
    layer, rows = torch.zeros(case.layout.layer_bytes, dtype=torch.uint8), Rows(ints(0, 1), ints(0), ints(0))
    elementwise = make(LAUNCHERS["fast"], values.dtype, case.heads, 64, 16, kv_dtype)
    elementwise.rope_and_store(qkv, layer, ints(0).view(1, 1), rows, None, None)
    numbers, scales = case.read(layer, 1, 0, 0)
    return numbers[0], scales[0]


def test_q8_0_is_the_cpus_bit_for_bit_at_the_edges() -> None:
    torch.manual_seed(0)
    for scale in (1e-45, 1e-39, 1e-37, 1e-8, 1.0, 3e4, 1e7, 3e38):
        values = torch.randn(64).clamp(-1, 1) * scale
        values[:4] = torch.tensor([scale, -scale, scale * 0.5 / 127, -0.0])
        expected, expected_scales = quantise(values)
        numbers, scales = store_values(values, "q8_0")
        assert torch.equal(numbers, expected.flatten()), scale
        assert torch.equal(scales, expected_scales.flatten()), scale
    halves = torch.arange(-64, 64).clamp(-63.5, 63.5) + 0.5  # of a scale of 0.5: every second is a tie
    expected, _ = quantise(halves)
    assert torch.equal(store_values(halves, "q8_0")[0], expected.flatten())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_q8_0_block_with_a_number_that_is_not_finite_has_no_scale(bad: float) -> None:
    values = torch.ones(64)
    values[40] = bad
    _, scales = store_values(values, "q8_0")
    assert scales.isnan().tolist() == [False, True]


def test_fp8_is_torchs_e4m3_of_every_half() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[halves.isfinite()]
    halves = torch.cat([halves, halves[: -len(halves) % 256]]).view(-1, 256)
    expected = halves.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for row in range(0, len(halves), 9):
        assert torch.equal(store_values(halves[row], "fp8")[0].view(torch.uint8), expected[row])


def test_fp8_saturates_and_keeps_what_is_no_number() -> None:
    values = torch.zeros(64)
    values[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e9])
    numbers, _ = store_values(values, "fp8")
    assert numbers[:4].float().nan_to_num(-1).tolist() == [448, -448, -1, 448]


# ---- Activations, gathers, copies ----


@pytest.mark.parametrize("size", [8, 1032])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations_agree_with_float64(dtype: torch.dtype, name: str, size: int) -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(3, 2 * size) * 4
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -30.0])
    gate_up, out = gate_up.to(dtype), poisoned(3, size, dtype=dtype)
    getattr(make(LAUNCHERS["fast"], dtype), name)(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=-1)
    functional = torch.nn.functional
    activated = functional.silu(gate) if name == "silu_mul" else functional.gelu(gate, approximate="tanh")
    assert_close(out, activated * up, dtype)


def test_embedding_resolves_last_tokens_and_gives_zeros_for_what_is_no_token(
    launcher: EmulatedLauncher, dtype: torch.dtype
) -> None:
    table, residual = torch.randn(50, 72).to(dtype), poisoned(7, 72, dtype=torch.float32)
    rows = Rows(ints(0, 1, 2, 3, 7), ints(0, 0, 0, 0), ints(2, 0, -1, 1))
    input_ids, last_tokens = ints(FROM_SLOT, 49, FROM_SLOT, 50, -7, 0, FROM_SLOT), ints(10**9, 13, 7)
    make(launcher, dtype, hidden=72).embed(table, input_ids, rows, last_tokens, residual)
    expected = torch.stack([table[7], table[49], *[torch.zeros_like(table[0])] * 3, table[0], table[13]])
    assert torch.equal(residual, expected.float())


@pytest.mark.parametrize("dtype_of_rows", [torch.float32, torch.bfloat16])
def test_rows_are_gathered_and_padding_stays(launcher: EmulatedLauncher, dtype_of_rows: torch.dtype) -> None:
    source = torch.randn(9, 2080).to(dtype_of_rows)
    out = torch.full((4, 2064), 5.0, dtype=dtype_of_rows)
    make(launcher).gather_rows(source, ints(8, 0, -1, 3), out[:, :2056])
    expected = torch.full_like(out, 5.0)
    expected[[0, 1, 3], :2056] = source[[8, 0, 3], :2056]
    assert torch.equal(out, expected)


def test_rows_of_odd_bytes_are_refused() -> None:
    source = torch.zeros(2, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="24 bytes"):
        make(LAUNCHERS["fast"]).gather_rows(source, ints(0), torch.zeros(1, 12, dtype=torch.bfloat16))


@pytest.mark.parametrize("kv_dtype", ["q8_0", "bf16"])
def test_pages_are_copied_in_all_layers_and_nothing_else(launcher: EmulatedLauncher, kv_dtype: str) -> None:
    layout = CacheLayout(3, 6, 16, 2, 160, kv_dtype)
    cache = torch.randint(0, 256, (layout.num_bytes,), dtype=torch.uint8).view(3, 6, -1)
    expected = cache.clone()
    expected[:, 5], expected[:, 0] = cache[:, 2], cache[:, 4]
    make(launcher).copy_pages(cache, cache, ints(2, 5, -1, -1, 4, 0).view(3, 2), layout)
    assert torch.equal(cache, expected)


def test_pages_are_copied_to_a_buffer_of_another_number_of_pages() -> None:
    layout = CacheLayout(2, 6, 16, 1, 64, "fp8")
    cache = torch.randint(0, 256, (2, 6, layout.page_bytes), dtype=torch.uint8)
    host = torch.zeros(2, 3, layout.page_bytes, dtype=torch.uint8)
    make(LAUNCHERS["fast"]).copy_pages(cache, host, ints(5, 0, 1, 2).view(2, 2), layout)
    assert torch.equal(host[:, [0, 2]], cache[:, [5, 1]])
    assert not host[:, 1].any()


# ---- What the kernels do not serve ----


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((4096, 14336, 128, 128, "q8_0"), None),
        ((4095, 14336, 128, 128, "bf16"), "hidden_size is 4095"),
        ((32768, 14336, 128, 128, "bf16"), "hidden_size is 32768"),
        ((4096, 100, 128, 128, "bf16"), "intermediate_size is 100"),
        ((4096, 14336, 512, 128, "bf16"), "head_dim is 512"),
        ((4096, 14336, 80, 20, "bf16"), "rotary_dim is 20"),
        ((4096, 14336, 80, 80, "q8_0"), "q8_0 cache needs a multiple of 32"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(sizes: tuple[int, int, int, int, str], reason: str | None) -> None:
    found = refusal(*sizes)
    assert found == reason if reason is None else reason in str(found)


def test_stored_results_do_not_depend_on_the_batch() -> None:
    heads, rope = HeadShape(4, 2, 128), rope_rows(64, 128)
    elementwise = make(LAUNCHERS["fast"], torch.bfloat16, heads, kv_dtype="q8_0", rotary_dim=128, page_size=32)
    layout = CacheLayout(1, 4, 32, 2, 128, "q8_0")
    qkv = torch.randn(6, heads.qkv_size).bfloat16()
    table = torch.arange(4, dtype=torch.int32).view(4, 1)
    results = []
    for tokens, rows in (
        (slice(0, 6), Rows(ints(0, 1, 2, 6), ints(3, 40 - 32, 7), ints(0, 1, 2))),
        (slice(2, 6), Rows(ints(0, 4), ints(7), ints(2))),
    ):
        mine, layer = qkv[tokens].clone(), torch.zeros(layout.num_bytes, dtype=torch.uint8)
        elementwise.rope_and_store(mine, layer, table, rows, rope, None)
        results.append((mine[-4:], layer.view(4, -1)[2]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert np.count_nonzero(results[0][1].numpy())
