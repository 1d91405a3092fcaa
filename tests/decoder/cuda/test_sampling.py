"""The sampling kernels on the emulator: against the host's sampler, float64 filters, chi-square and torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.forward_pass import FROM_SLOT, NOT_FINITE, SamplingParams, SlotInit, StepBatch, TokenMasks
from backend.passes.decoder.cuda.sampling import MAX_BIASES, DeviceSampler, LogprobBuffers, SlotArrays
from backend.sampler import HostSampling, token_logprobs
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
LAUNCHERS = {
    "fast": FAST,
    "forward": EmulatedLauncher("check", "forward"),
    "reverse": EmulatedLauncher("check", "reverse"),
    "random": EmulatedLauncher("check", "random", 5),
}
POISON = -77
CPU = torch.device("cpu")


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> EmulatedLauncher:
    return LAUNCHERS[request.param]


def slot_init(slot: int, tokens: Sequence[int] = (1,), num_prompt_tokens: int = 1, **params: object) -> SlotInit:
    token_ids = np.array(tokens, np.int32)
    return SlotInit(slot, SamplingParams(**params), token_ids, num_prompt_tokens)  # type: ignore[arg-type]


class Device:
    """A sampler on the emulator with the arrays of one step at a time."""

    def __init__(
        self, vocab_size: int, max_slots: int, launcher: EmulatedLauncher = FAST, dtype: torch.dtype = torch.float32
    ) -> None:
        self.slots = SlotArrays(max_slots, vocab_size, CPU)
        self.sampler = DeviceSampler(launcher, self.slots, dtype)
        self.dtype = dtype

    def take(self, *inits: SlotInit) -> None:
        self.sampler.take_slots(torch.from_numpy(self.sampler.pack(inits)), len(inits))

    def sample(
        self,
        logits: NDArray[np.float32] | Tensor,
        slots: list[int],
        position: int = 10,
        masks: TokenMasks | None = None,
    ) -> list[int]:
        """One token for each row; slots may be -1."""
        logits = torch.as_tensor(logits).to(self.dtype)
        tokens = torch.full((len(slots),), POISON, dtype=torch.int32)
        bits = None
        if masks is not None:
            rows = torch.full((len(slots),), -1, dtype=torch.int32)
            rows[torch.from_numpy(masks.rows).long()] = torch.arange(len(masks.rows), dtype=torch.int32)
            bits = rows, torch.from_numpy(masks.bits.view(np.int32))
        selection = self.sampler.selection(np.array([slot for slot in slots if slot >= 0], np.int32))
        contexts = torch.full((len(slots),), position - 1, dtype=torch.int32)
        self.sampler.sample(logits, torch.tensor(slots, dtype=torch.int32), contexts, selection, tokens, bits)
        # Scratch is left as the next step expects it.
        assert not self.slots.histograms.any()
        return tokens.tolist()


class Host:
    """The host's sampler, driven in the same way."""

    def __init__(self, vocab_size: int, max_slots: int) -> None:
        self.sampler = HostSampling(vocab_size, max_slots)

    def batch(self, slots: list[int], position: int, inits: tuple[SlotInit, ...] = ()) -> StepBatch:
        n = len(slots)
        return StepBatch(
            input_ids=np.full(n, FROM_SLOT, np.int32),
            query_starts=np.arange(n + 1, dtype=np.int32),
            context_lens=np.full(n, position - 1, np.int32),
            page_table=np.zeros((n, 1), np.int32),
            slots=np.array(slots, np.int32),
            logit_rows=np.arange(n, dtype=np.int32),
            slot_inits=inits,
        )

    def take(self, *inits: SlotInit) -> None:
        self.sampler.begin_step(self.batch([init.slot for init in inits], 1, inits))

    def sample(
        self, logits: NDArray[np.float32], slots: list[int], position: int = 10, masks: TokenMasks | None = None
    ) -> list[int]:
        return self.sampler.sample(logits, self.batch(slots, position), masks).token_ids.tolist()


def mask_of(vocab_size: int, rows: dict[int, list[int]]) -> TokenMasks:
    allowed = np.zeros((len(rows), -(-vocab_size // 32) * 32), np.uint8)
    for place, tokens in enumerate(rows.values()):
        allowed[place, tokens] = 1
    return TokenMasks(np.array(list(rows), np.int32), np.packbits(allowed, axis=1, bitorder="little").view(np.uint32))


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


# ---- Greedy, and what adjusts logits ----


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 1001, 4096, 4097, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_of_the_largest_logits(vocab_size: int, dtype: torch.dtype) -> None:
    device = Device(vocab_size, 5, dtype=dtype)
    device.take(*(slot_init(slot, temperature=0.0) for slot in range(5)))
    logits = torch.from_numpy(random_logits(5, vocab_size)).to(dtype)
    logits[3] = 1.5
    expected = logits.float().numpy().argmax(axis=1).tolist()
    assert device.sample(logits, [4, 2, 0, 1, 3]) == expected
    assert device.slots.last_tokens.tolist() == [expected[place] for place in (2, 3, 1, 4, 0)]


def test_the_largest_vocabulary_is_served() -> None:
    device = Device(1 << 18, 2)
    device.take(slot_init(0, temperature=0.0, logit_bias=(((1 << 18) - 1, 100.0),)), slot_init(1, top_k=1))
    logits = random_logits(2, 1 << 18)
    assert device.sample(logits, [0, 1]) == [(1 << 18) - 1, int(logits[1].argmax())]
    with pytest.raises(ValueError, match="vocab_size is 262145"):
        SlotArrays(1, (1 << 18) + 1, CPU)


def test_rows_may_lie_apart(launcher: EmulatedLauncher) -> None:
    device = Device(60, 3, launcher)
    device.take(*(slot_init(slot, temperature=0.0) for slot in range(3)))
    wide = torch.full((3, 64), torch.nan)
    wide[:, :60] = torch.from_numpy(random_logits(3, 60))
    assert device.sample(wide[:, :60], [0, 1, 2]) == wide[:, :60].argmax(dim=1).tolist()


def test_penalties_biases_and_masks_give_the_hosts_greedy_tokens(launcher: EmulatedLauncher) -> None:
    """Over several steps, so that what is sampled counts."""
    vocab = 5000 if launcher is FAST else 90
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, vocab, 40).tolist()
    inits = (
        slot_init(0, prompt, 30, temperature=0.0, repetition_penalty=1.7),
        slot_init(1, prompt, 5, temperature=0.0, frequency_penalty=0.9, presence_penalty=-0.3),
        slot_init(2, prompt, 40, temperature=0.0, presence_penalty=1.5, repetition_penalty=0.8),
        slot_init(3, temperature=0.0, logit_bias=((3, 4.0), (vocab - 1, 3.5), (3, -1.0), (64, 3.0))),
        slot_init(4, temperature=0.0),
        slot_init(5, prompt, 20, temperature=0.0, frequency_penalty=1.0, logit_bias=((7, 5.0),)),
    )
    device, host = Device(vocab, 6, launcher), Host(vocab, 6)
    device.take(*inits)
    host.take(*inits)
    order = [3, 1, 5, 0, 4, 2]
    for step in range(12 if launcher is FAST else 2):
        logits = random_logits(6, vocab, seed=1, scale=1.0)  # the same in each step: only counts change the tokens
        masks = mask_of(vocab, {1: [5, 40, vocab - 1], 4: list(range(0, vocab, 7))}) if step % 2 else None
        assert device.sample(logits, order, 10 + step, masks) == host.sample(logits, order, 10 + step, masks)


def test_a_slots_next_owner_sees_nothing_of_the_last_one() -> None:
    device = Device(50, 2)
    logits = np.zeros((1, 50), np.float32)
    logits[0, 9], logits[0, 4] = 1.0, 0.5
    tokens = [9] * 8
    device.take(slot_init(1, tokens, 2, temperature=0.0, frequency_penalty=1.0, logit_bias=((9, 1.0),)))
    assert device.sample(logits, [1]) == [4]
    device.take(slot_init(1, [3], 1, temperature=0.0, frequency_penalty=0.1))
    assert device.sample(logits, [1]) == [9]
    device.take(slot_init(1, tokens, 2, temperature=0.0))
    assert device.sample(logits, [1]) == [9]


def test_rows_of_padding_are_left_alone(launcher: EmulatedLauncher) -> None:
    device = Device(40, 4, launcher)
    device.take(slot_init(0, temperature=0.0), slot_init(1, top_p=0.5), slot_init(2, temperature=0.0))
    device.slots.last_tokens[:] = torch.tensor([11, 12, 13, 14])
    logits = random_logits(4, 40)
    logits[[0, 2]] = np.nan
    tokens = device.sample(logits, [-1, 2, -1, 1])
    assert tokens[0] == tokens[2] == POISON
    assert tokens[1] == logits[1].argmax()
    assert device.slots.last_tokens.tolist() == [11, tokens[3], tokens[1], 14]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "typical_p": 0.9}])
def test_rows_that_are_no_numbers_are_named_and_the_slot_stays_in_range(params: dict[str, float]) -> None:
    device = Device(5000, 6)
    device.take(*(slot_init(slot, seed=slot, **params) for slot in range(6)))
    logits = random_logits(6, 5000)
    logits[0, 4500] = np.nan
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    logits[3] = np.nan
    logits[4, 1:] = -np.inf
    logits[5, 7] = -np.nan
    assert device.sample(logits, [0, 1, 2, 3, 4, 5]) == [NOT_FINITE] * 4 + [0] + [NOT_FINITE]
    assert not device.slots.last_tokens.any()
    everything = random_logits(6, 5000)
    assert min(device.sample(everything, [0, 1, 2, 3, 4, 5])) >= 0


def test_a_mask_hides_what_is_no_number() -> None:
    device = Device(70, 1)
    device.take(slot_init(0, temperature=0.0))
    logits = random_logits(1, 70)
    logits[0, 33] = np.nan
    assert device.sample(logits, [0], masks=mask_of(70, {0: [69, 65]})) == [65 + 4 * int(logits[0, 69] > logits[0, 65])]


# ---- Filters ----


def kept_by_reference(logits: NDArray[np.float32], params: SamplingParams) -> set[int]:
    """Which tokens one row may draw, in float64; all that tie with a filter's last one are kept."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    kept = np.isfinite(scaled)
    if 0 < params.top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-params.top_k]
    if params.typical_p < 1:
        mass = np.where(kept, np.exp(scaled), 0)
        mass /= mass.sum()
        surprise = -np.log(mass, where=mass > 0, out=np.full_like(mass, np.inf))
        distance = np.abs(surprise - (mass * np.where(mass > 0, surprise, 0)).sum())
        order = np.argsort(distance)
        kept &= distance <= distance[order[np.searchsorted(np.cumsum(mass[order]), params.typical_p)]]
    if params.top_p < 1:
        mass = np.where(kept, np.exp(scaled), 0)
        order = np.argsort(-mass)
        kept &= mass >= mass[order[np.searchsorted(np.cumsum(mass[order]), params.top_p * mass.sum())]]
    if params.min_p:
        kept &= np.exp(scaled) >= params.min_p
    return set(np.flatnonzero(kept).tolist())


FILTERS = [
    {"top_k": 1},
    {"top_k": 5, "temperature": 2.0},
    {"top_k": 29, "temperature": 3.0},
    {"top_p": 0.6, "temperature": 1.5},
    {"top_p": 0.01},
    {"min_p": 0.2, "temperature": 1.3},
    {"min_p": 1.0},
    {"typical_p": 0.5, "temperature": 1.5},
    {"top_k": 12, "top_p": 0.8, "temperature": 2.0},
    {"top_k": 15, "typical_p": 0.8, "top_p": 0.7, "min_p": 0.02, "temperature": 2.0},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_leave_exactly_the_tokens_of_the_reference(params: dict[str, float]) -> None:
    """Every token that is left has 1 % of the draws at least, so that 1,200 of them miss none."""
    vocab, draws = 30, 1200
    logits = random_logits(vocab, seed=8, scale=1.0)
    allowed = kept_by_reference(logits, SamplingParams(**params))  # type: ignore[arg-type]
    device = Device(vocab, draws)
    device.take(*(slot_init(slot, seed=slot, **params) for slot in range(draws)))
    assert set(device.sample(np.tile(logits, (draws, 1)), list(range(draws)))) == allowed


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_of_a_large_vocabulary_are_exact(params: dict[str, float]) -> None:
    """Too many tokens to draw them all: what the thresholds in the row's state leave is compared."""
    vocab = 9001
    logits = random_logits(vocab, seed=4, scale=3.0)
    logits[[5, 900, 8000]] = -np.inf
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    allowed = kept_by_reference(logits, sampling)
    device = Device(vocab, 1)
    device.take(slot_init(0, **params))
    device.sample(logits[None], [0])
    # The row's state: peak, mean of scaled gaps, largest gap and largest deviation, as float32.
    peak, mean, gap, deviation = (float(x) for x in device.slots.states.view(torch.float32)[0, 14:18])
    gaps = (peak - logits).astype(np.float64)
    within = (gaps <= gap) & (np.abs(gaps / sampling.temperature - mean) <= deviation * (1 + 1e-6)) & np.isfinite(gaps)
    if sampling.min_p:
        within &= np.exp(-gaps / sampling.temperature) >= sampling.min_p
    assert set(np.flatnonzero(within).tolist()) == allowed


def test_tokens_that_tie_with_the_last_one_are_all_kept() -> None:
    logits = np.array([0, 3, 1, 3, 1, 1, 0], np.float32)
    draws = 400
    for params, allowed in (({"top_k": 3}, {1, 2, 3, 4, 5}), ({"top_p": 0.3}, {1, 3}), ({"top_k": 1}, {1, 3})):
        device = Device(7, draws)
        device.take(*(slot_init(slot, seed=slot, temperature=3.0, **params) for slot in range(draws)))
        assert set(device.sample(np.tile(logits, (draws, 1)), list(range(draws)))) == allowed


def test_min_p_leaves_the_likeliest_token_where_typical_sampling_dropped_the_peak() -> None:
    logits = np.zeros((1, 700), np.float32)
    logits[0, 0], logits[0, 300], logits[0, 5] = 5.5, 0.1, -np.inf
    device = Device(700, 1)
    device.take(slot_init(0, typical_p=0.2, min_p=0.1))
    assert device.sample(logits, [0]) == [300]


def test_filters_see_what_masks_and_biases_leave() -> None:
    logits, draws = random_logits(40, seed=2, scale=0.1), 300
    device = Device(40, draws)
    bias = ((39, 1.0), (38, 1.0))
    device.take(*(slot_init(slot, seed=slot, top_k=2, logit_bias=bias) for slot in range(draws)))
    masks = mask_of(40, {row: [1, 2, 39] for row in range(draws)})
    allowed = {39, 1 if logits[1] > logits[2] else 2}
    assert set(device.sample(np.tile(logits, (draws, 1)), list(range(draws)), masks=masks)) == allowed


@pytest.mark.parametrize("params", [{"top_k": 3, "top_p": 0.9}, {"typical_p": 0.7, "min_p": 0.01}])
def test_filters_have_no_races_and_stay_in_bounds(launcher: EmulatedLauncher, params: dict[str, float]) -> None:
    """Two segments a row, and the same tokens in every order of threads and blocks."""
    logits = random_logits(2, 4104, seed=6)
    tokens = []
    for one in (FAST, launcher):
        device = Device(4104, 3, one)
        device.take(slot_init(2, seed=9, **params), slot_init(0, [1, 2, 4100], 2, seed=8, frequency_penalty=0.5))
        tokens.append([device.sample(logits, [2, 0], position) for position in (10, 11)])
    assert tokens[0] == tokens[1]


# ---- The distribution ----


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 12}, {"min_p": 0.05, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution_by_chi_square(params: dict[str, float]) -> None:
    """The bound is the 1 - 1e-6 quantile of chi-square by Wilson and Hilferty."""
    vocab, width, num_steps = 20, 500, 6
    logits = random_logits(vocab, seed=5, scale=1.5)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    device = Device(vocab, width)
    device.take(*(slot_init(slot, seed=slot * 7919, **params) for slot in range(width)))
    counts = np.zeros(vocab)
    for position in range(1, num_steps + 1):
        tokens = device.sample(np.tile(logits, (width, 1)), list(range(width)), position)
        counts += np.bincount(tokens, minlength=vocab)
    kept = sorted(kept_by_reference(logits, sampling))
    weights = np.exp(logits[kept].astype(np.float64) / sampling.temperature)
    expected = weights / weights.sum() * width * num_steps
    assert counts.sum() == counts[kept].sum()
    dof = len(kept) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert statistic < dof * (1 - 2 / (9 * dof) + 4.75 * (2 / (9 * dof)) ** 0.5) ** 3


def test_noise_is_philox_of_seed_position_and_token() -> None:
    """The draw is repeated in float64 from the definition."""
    vocab, seed, temperature = 5003, 0x1234_5678_9ABC_DEF0, 0.9
    logits = random_logits(vocab, seed=3)
    device = Device(vocab, 1)
    device.take(slot_init(0, seed=seed, temperature=temperature))
    for position in (1, 2, 70_000):
        bits = np.concatenate([philox(seed, position, group) for group in range(-(-vocab // 4))])[:vocab]
        noise = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
        assert device.sample(logits[None], [0], position) == [int((logits / temperature + noise).argmax())]


def philox(key: int, counter_0: int, counter_1: int) -> NDArray[np.float64]:
    low = 2**32 - 1
    c, k = [counter_0, counter_1, 0, 0], [key & low, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & low, p0 >> 32 ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return np.array(c, np.float64)


def test_a_draw_does_not_depend_on_who_shares_the_batch_nor_on_the_slot() -> None:
    vocab, rng = 4200, np.random.default_rng(1)
    mine = random_logits(vocab, seed=1)
    params = {"temperature": 0.9, "top_p": 0.8, "top_k": 200, "seed": 77, "repetition_penalty": 1.3}
    alone = Device(vocab, 8)
    alone.take(slot_init(0, [4, 5], **params))
    expected = [alone.sample(mine[None], [0], position)[0] for position in range(2, 8)]
    crowded = Device(vocab, 8)
    crowded.take(slot_init(5, [4, 5], **params))
    got = []
    for position in range(2, 8):
        others = rng.permutation(np.delete(np.arange(8), 5))[: rng.integers(1, 7)].tolist()
        crowded.take(*(slot_init(slot, seed=slot, temperature=slot / 2, top_k=slot, top_p=0.7) for slot in others))
        where = int(rng.integers(0, len(others) + 1))
        logits = np.concatenate([random_logits(len(others), vocab, seed=position), mine[None]])
        order = [*range(where), len(others), *range(where, len(others))]
        slots = [*others[:where], 5, *others[where:]]
        got.append(crowded.sample(logits[order], slots, position)[where])
    assert got == expected


def test_a_tiny_temperature_is_greedy() -> None:
    device = Device(3000, 20)
    device.take(*(slot_init(slot, seed=slot, temperature=1e-30) for slot in range(20)))
    logits = random_logits(20, 3000)
    assert device.sample(logits, list(range(20))) == logits.argmax(axis=1).tolist()


# ---- Log probabilities ----


def report(
    device: Device, launcher: EmulatedLauncher, logits: Tensor, tokens: list[int], rows: list[int], width: int
) -> LogprobBuffers:
    num_rows = len(rows)
    out = LogprobBuffers(
        torch.full((num_rows,), 99.0),
        torch.full((num_rows,), POISON, dtype=torch.int32),
        torch.full((num_rows, width), POISON, dtype=torch.int32),
        torch.full((num_rows, width), 99.0),
    )
    sampler = DeviceSampler(launcher, device.slots, logits.dtype)
    sampler.logprobs(logits, torch.tensor(tokens, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32), out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [20, 4001, 20_000])
def test_log_probabilities_agree_with_torch(dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.from_numpy(random_logits(3, vocab_size, scale=4.0)).to(dtype)
    logits[1, 10:15] = logits[1].max()
    logits[2, 5] = -torch.inf
    tokens = [3, 12, 7]
    out = report(Device(vocab_size, 3), FAST, logits, tokens, [0, 2, 1], 20)
    expected = token_logprobs(logits.float().numpy(), np.array(tokens, np.int32), np.array([0, 2, 1]), 20)
    softmax = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(out.chosen.double(), softmax[[0, 2, 1], [3, 7, 12]], rtol=0, atol=2e-5)
    assert out.ranks.tolist() == expected.ranks.tolist()
    assert out.top_ids.tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(out.top.numpy(), expected.top, rtol=0, atol=2e-5)


def test_log_probabilities_skip_padding_and_mark_rows_without_a_token(launcher: EmulatedLauncher) -> None:
    logits = torch.from_numpy(random_logits(2, 50))
    out = report(Device(50, 2), launcher, logits, [NOT_FINITE, 4], [-1, 0, 1], 2)
    assert (out.chosen[0], out.ranks[0], out.top_ids[0].tolist()) == (99.0, POISON, [POISON, POISON])
    assert out.chosen[1].isnan()
    assert (out.ranks[1], out.top_ids[1].tolist()) == (0, [-1, -1])
    assert out.top_ids[2].tolist() == logits[1].topk(2).indices.tolist()


def test_a_report_without_alternatives_has_the_chosen_token_alone() -> None:
    logits = torch.from_numpy(random_logits(1, 50))
    out = report(Device(50, 1), FAST, logits, [4], [0], 0)
    torch.testing.assert_close(out.chosen[0], torch.log_softmax(logits[0], 0)[4], rtol=0, atol=1e-5)


# ---- What is packed on the host ----


def test_only_the_kernels_that_rows_ask_for_are_launched() -> None:
    launcher = EmulatedLauncher()
    device = Device(50, 6, launcher)
    device.take(
        slot_init(0, temperature=0.0, top_p=0.5, top_k=3),
        slot_init(1, top_k=50, num_logprobs=0),
        slot_init(2, min_p=0.1),
        slot_init(3, top_p=0.9, num_logprobs=7),
        slot_init(4, typical_p=0.9, top_k=3),
    )
    logits = random_logits(2, 50)
    for slots, num_launches in (([0, 1], 1), ([0, 2], 2), ([3, 0], 5), ([4, 3], 12)):
        before = launcher.num_launches
        device.sample(logits, slots)
        assert launcher.num_launches - before == num_launches
    selection = device.sampler.selection(np.array([0, 1, 3], np.int32))
    assert (selection.logprob_rows.tolist(), selection.num_top) == ([1, 2], 7)


def test_the_arrays_have_the_bytes_that_are_planned() -> None:
    for max_slots, vocab_size in ((1, 1), (7, 1001)):
        arrays = SlotArrays(max_slots, vocab_size, CPU)
        tensors = [value for value in vars(arrays).values() if isinstance(value, Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) == SlotArrays.num_bytes(max_slots, vocab_size)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (slot_init(4), "slot is 4; there are 4"),
        (slot_init(0, logit_bias=((50, 1.0),)), "token ids are 50"),
        (slot_init(0, [3, 50], presence_penalty=1.0), "token ids are 3 … 50"),
        (slot_init(0, logit_bias=((1, 1.0),) * (MAX_BIASES + 1)), "301 biases; at most 300"),
    ],
)
def test_slots_tokens_and_biases_out_of_range_are_refused(init: SlotInit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device(50, 4).take(init)


def test_more_rows_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows are to be sampled; there are 2 slots"):
        Device(50, 2).sample(random_logits(3, 50), [0, 1, -1])
