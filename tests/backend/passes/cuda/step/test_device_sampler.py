"""The sampling kernels on the emulator agree with the host sampler, filters in float64, chi-square tests and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.backend.forward_pass import FROM_EMBEDDINGS, NOT_FINITE, SlotInit
from penstock.backend.passes.cuda.step.device_sampler import MAX_BIASES, SlotArrays
from penstock.tools.gpu.cases.sampler import (
    CPU,
    FILTERS,
    MAX_LISTED,
    POISON,
    SamplingDevice,
    check_biases,
    check_counts,
    check_distribution,
    check_fallback,
    check_filter,
    check_greedy,
    check_list,
    check_misjudged_rows,
    check_noise,
    check_penalties,
    check_rare_noise,
    check_thresholds,
    check_ties,
    mask_of,
    random_logits,
    slot_init,
)
from penstock.tools.gpu.cases.sampling import check_drafts, check_logprobs, report
from tests.cuda_emulator import EmulatedLauncher

FAST = EmulatedLauncher()
LAUNCHERS = {
    "fast": FAST,
    "forward": EmulatedLauncher("check", "forward"),
    "reverse": EmulatedLauncher("check", "reverse"),
    "random": EmulatedLauncher("check", "random", 5),
}


class Device(SamplingDevice):
    """A `SamplingDevice` on the emulator."""

    def __init__(
        self,
        vocab_size: int,
        max_slots: int,
        launcher: EmulatedLauncher = FAST,
        dtype: torch.dtype = torch.float32,
        max_listed: int = MAX_LISTED,
        blocks_to_fill: int = 1024,
    ) -> None:
        super().__init__(launcher, vocab_size, max_slots, dtype, max_listed, blocks_to_fill)


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> EmulatedLauncher:
    return LAUNCHERS[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of the logits."""
    made: torch.dtype = request.param
    return made


# ---- Greedy sampling and adjusted logits ----


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 1001, 4096, 4097, 9000])
def test_greedy_takes_the_first_of_the_largest_logits(vocab_size: int, dtype: torch.dtype) -> None:
    check_greedy(FAST, dtype, vocab_size)


def test_the_largest_vocabulary_is_sampled() -> None:
    device = Device(1 << 19, 2)
    device.take(slot_init(0, temperature=0.0, logit_bias=(((1 << 19) - 1, 100.0),)), slot_init(1, top_k=1))
    logits = random_logits(2, 1 << 19)
    assert device.sample(logits, [0, 1]) == [(1 << 19) - 1, int(logits[1].argmax())]
    with pytest.raises(ValueError, match="vocab_size is 524289"):
        SlotArrays(1, (1 << 19) + 1, CPU)


def test_rows_may_have_a_larger_stride(launcher: EmulatedLauncher) -> None:
    device = Device(60, 3, launcher)
    device.take(*(slot_init(slot, temperature=0.0) for slot in range(3)))
    wide = torch.full((3, 64), torch.nan)
    wide[:, :60] = torch.from_numpy(random_logits(3, 60))
    assert device.sample(wide[:, :60], [0, 1, 2]) == wide[:, :60].argmax(dim=1).tolist()


def test_penalties_biases_and_masks_give_the_host_samplers_greedy_tokens(launcher: EmulatedLauncher) -> None:
    vocab_size, num_steps = (5000, 12) if launcher is FAST else (90, 2)
    check_penalties(launcher, vocab_size, num_steps)


def test_biases_of_tokens_at_segment_edges_are_applied(launcher: EmulatedLauncher) -> None:
    check_biases(launcher)


def test_a_token_count_saturates() -> None:
    check_counts(FAST)


def test_positions_with_drafts_draw_the_tokens_of_steps_without_them(launcher: EmulatedLauncher) -> None:
    check_drafts(launcher, 4500 if launcher is FAST else 90, samples=FAST)


def test_penalties_ignore_prompt_embeddings() -> None:
    device = Device(50, 1)
    logits = np.zeros((1, 50), np.float32)
    logits[0, [FROM_EMBEDDINGS, 5, 6]] = 2.0, 1.9, 1.8
    tokens = [FROM_EMBEDDINGS, FROM_EMBEDDINGS, 5]
    penalties = {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 1.0}
    device.take(slot_init(0, tokens, 2, **penalties))
    assert device.sample(logits, [0]) == [50 + FROM_EMBEDDINGS]
    assert device.sample(logits, [0]) == [6]
    device.take(slot_init(0, tokens[:2], 2, **penalties))
    assert device.sample(logits, [0]) == [50 + FROM_EMBEDDINGS]
    with pytest.raises(ValueError, match="token ids are -2"):
        device.take(slot_init(0, tokens, 1, **penalties))


def test_a_slots_next_owner_inherits_no_state() -> None:
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


def test_padding_rows_are_not_changed(launcher: EmulatedLauncher) -> None:
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
def test_rows_without_a_finite_logit_get_no_token_and_keep_the_slots_token_in_range(params: dict[str, float]) -> None:
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


def test_a_mask_hides_nan_logits() -> None:
    device = Device(70, 1)
    device.take(slot_init(0, temperature=0.0))
    logits = random_logits(1, 70)
    logits[0, 33] = np.nan
    assert device.sample(logits, [0], masks=mask_of(70, {0: [69, 65]})) == [65 + 4 * int(logits[0, 69] > logits[0, 65])]


# ---- Filters ----


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_keep_exactly_the_tokens_of_the_reference(params: dict[str, float]) -> None:
    check_filter(FAST, params, draws=200)


def test_all_filters_together_keep_exactly_the_tokens_of_the_reference(dtype: torch.dtype) -> None:
    """One set for each dtype: the next test checks every threshold in every dtype."""
    check_filter(FAST, FILTERS[-1], draws=200, dtype=dtype)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_of_a_large_vocabulary_are_exact(params: dict[str, float], dtype: torch.dtype) -> None:
    check_thresholds(FAST, params, dtype)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_are_exact_without_a_list_of_tokens(params: dict[str, float]) -> None:
    check_thresholds(FAST, params, max_listed=0, blocks_to_fill=1)


def test_filters_that_keep_more_tokens_than_were_listed_are_exact() -> None:
    check_misjudged_rows(FAST)


@pytest.mark.parametrize(("num_likely", "most_listed"), [(0, 8000), (40, 1000)])
def test_the_list_has_all_tokens_that_filters_keep(num_likely: int, most_listed: int) -> None:
    check_list(FAST, 128_256, num_likely, most_listed)


def test_tokens_that_tie_with_the_last_one_are_all_kept() -> None:
    check_ties(FAST)


def test_min_p_keeps_the_likeliest_remaining_token_after_typical_sampling_drops_the_peak() -> None:
    check_fallback(FAST)


def test_filters_apply_after_masks_and_biases() -> None:
    logits, draws = random_logits(40, seed=2, scale=0.1), 300
    device = Device(40, draws)
    bias = ((39, 1.0), (38, 1.0))
    device.take(*(slot_init(slot, seed=slot, top_k=2, logit_bias=bias) for slot in range(draws)))
    masks = mask_of(40, {row: [1, 2, 39] for row in range(draws)})
    allowed = {39, 1 if logits[1] > logits[2] else 2}
    assert set(device.sample(np.tile(logits, (draws, 1)), list(range(draws)), masks=masks)) == allowed


@pytest.mark.parametrize(
    ("order", "params", "dtype"),
    [
        ("forward", {"top_k": 3, "top_p": 0.9}, torch.float32),
        ("reverse", {"typical_p": 0.7, "min_p": 0.01}, torch.float32),
        ("random", {"top_k": 3, "top_p": 0.9}, torch.float32),
        ("random", {"typical_p": 0.7, "min_p": 0.01}, torch.float16),
        ("reverse", {"top_k": 3, "top_p": 0.9}, torch.bfloat16),
    ],
)
def test_filters_have_no_races_and_stay_in_bounds(order: str, params: dict[str, float], dtype: torch.dtype) -> None:
    """Rows have two chunks; the tokens must be the same in every order, and in one block without a list."""
    logits = random_logits(2, 4104, seed=6)
    tokens = []
    for one in (FAST, LAUNCHERS[order]):
        is_special = dtype is torch.bfloat16
        device = Device(4104, 3, one, dtype, 0 if is_special else MAX_LISTED, 1 if is_special else 1024)
        device.take(slot_init(2, seed=9, **params), slot_init(0, [1, 2, 4100], 2, seed=8, frequency_penalty=0.5))
        tokens.append([device.sample(logits, [2, 0], position) for position in (10, 11)])
    assert tokens[0] == tokens[1]


# ---- The distribution ----


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 12}, {"min_p": 0.05, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution_by_chi_square(params: dict[str, float]) -> None:
    check_distribution(FAST, params, num_steps=3)


def test_noise_equals_philox_of_seed_position_and_token() -> None:
    check_noise(FAST)


def test_rare_large_noise_has_the_exact_value() -> None:
    check_rare_noise(FAST)


def test_a_draw_does_not_depend_on_batch_or_slot() -> None:
    vocab, rng = 4200, np.random.default_rng(1)
    mine = random_logits(vocab, seed=1)
    params = {"temperature": 0.9, "top_p": 0.8, "top_k": 200, "seed": 77, "repetition_penalty": 1.3}
    alone = Device(vocab, 8)
    alone.take(slot_init(0, [4, 5], **params))
    expected = [alone.sample(mine[None], [0], position)[0] for position in range(2, 8)]
    shared = Device(vocab, 8)
    shared.take(slot_init(5, [4, 5], **params))
    got = []
    for position in range(2, 8):
        others = rng.permutation(np.delete(np.arange(8), 5))[: rng.integers(1, 7)].tolist()
        shared.take(*(slot_init(slot, seed=slot, temperature=slot / 2, top_k=slot, top_p=0.7) for slot in others))
        where = int(rng.integers(0, len(others) + 1))
        logits = np.concatenate([random_logits(len(others), vocab, seed=position), mine[None]])
        order = [*range(where), len(others), *range(where, len(others))]
        slots = [*others[:where], 5, *others[where:]]
        got.append(shared.sample(logits[order], slots, position)[where])
    assert got == expected


def test_a_tiny_temperature_is_greedy() -> None:
    device = Device(3000, 20)
    device.take(*(slot_init(slot, seed=slot, temperature=1e-30) for slot in range(20)))
    logits = random_logits(20, 3000)
    assert device.sample(logits, list(range(20))) == logits.argmax(axis=1).tolist()


# ---- Log probabilities ----


@pytest.mark.parametrize("vocab_size", [20, 4001, 20_000])
def test_log_probabilities_agree_with_torch(vocab_size: int, dtype: torch.dtype) -> None:
    check_logprobs(FAST, dtype, vocab_size)


def test_log_probabilities_skip_padding_and_mark_rows_without_a_token(
    launcher: EmulatedLauncher, dtype: torch.dtype
) -> None:
    logits = torch.from_numpy(random_logits(2, 50)).to(dtype)
    out = report(launcher, SlotArrays(2, 50, CPU), logits, [NOT_FINITE, 4], [-1, 0, 1], 2)
    assert (out.chosen[0], out.ranks[0], out.top_ids[0].tolist()) == (99.0, POISON, [POISON, POISON])
    assert out.chosen[1].isnan()
    assert (out.ranks[1], out.top_ids[1].tolist()) == (0, [-1, -1])
    assert out.top_ids[2].tolist() == logits[1].topk(2).indices.tolist()


def test_a_report_without_top_logprobs_has_only_the_chosen_token() -> None:
    logits = torch.from_numpy(random_logits(1, 50))
    out = report(FAST, SlotArrays(1, 50, CPU), logits, [4], [0], 0)
    torch.testing.assert_close(out.chosen[0], torch.log_softmax(logits[0], 0)[4], rtol=0, atol=1e-5)


# ---- Packing on the host ----


def test_only_kernels_that_rows_need_are_launched() -> None:
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
    for slots, num_launches in (([0, 1], 1), ([0, 2], 3), ([4, 3], 3)):
        before = launcher.num_launches
        device.sample(logits, slots)
        assert launcher.num_launches - before == num_launches
    features = device.sampler.features(np.array([0, 1, 3], np.int32))
    assert (features.logprob_rows.tolist(), features.num_top, features.named.tolist()) == ([1, 2], 7, [])
    device.take(slot_init(5, num_logprobs=0, logprob_token_ids=tuple(range(9))))
    features = device.sampler.features(np.array([3, 5], np.int32))
    assert (features.num_likeliest, features.num_top) == (7, 9)
    assert features.named.tolist() == [*[-1] * 9, *range(9)]
    assert not device.sampler.features(np.array([3], np.int32)).named.size


def test_the_slot_arrays_have_the_planned_size() -> None:
    for max_slots, vocab_size in ((1, 1), (7, 1001)):
        arrays = SlotArrays(max_slots, vocab_size, CPU)
        tensors = [value for value in vars(arrays).values() if isinstance(value, Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) == SlotArrays.num_bytes(max_slots, vocab_size)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (slot_init(4), "slot is 4; there are 4"),
        (slot_init(0, logit_bias=((50, 1.0),)), "token ids are 50"),
        (slot_init(0, logprob_token_ids=(3, 50)), "token ids are 3 … 50"),
        (slot_init(0, [3, 50], presence_penalty=1.0), "token ids are 3 … 50"),
        (slot_init(0, logit_bias=((1, 1.0),) * (MAX_BIASES + 1)), "301 biases; at most 300"),
    ],
)
def test_slots_tokens_and_biases_out_of_range_are_refused(init: SlotInit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device(50, 4).take(init)


def test_more_rows_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot sample 3 rows; there are 2 slots"):
        Device(50, 2).sample(random_logits(3, 50), [0, 1, -1])
