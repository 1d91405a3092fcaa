"""The host sampler against plain per-row references in float64, and its distribution by chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.forward_pass import (
    FROM_EMBEDDINGS,
    FROM_SLOT,
    NOT_FINITE,
    SamplingParams,
    SlotInit,
    StepBatch,
    TokenMasks,
)
from penstock.backend.sampling.numpy_sampler import philox_uniform
from penstock.backend.sampling.sampler import HostSampling
from tests.backend.sampling.conftest import MakeSampling

VOCAB = 700


def decode_batch(slots: list[int], context_len: int = 9, inits: tuple[SlotInit, ...] = ()) -> StepBatch:
    n = len(slots)
    return StepBatch(
        input_ids=np.full(n, FROM_SLOT, np.int32),
        query_starts=np.arange(n + 1, dtype=np.int32),
        context_lens=np.full(n, context_len, np.int32),
        page_table=np.zeros((n, 1), np.int32),
        slots=np.array(slots, np.int32),
        logit_rows=np.arange(n, dtype=np.int32),
        slot_inits=inits,
    )


def slot_init(slot: int, tokens: list[int] | None = None, num_prompt_tokens: int = 1, **params: object) -> SlotInit:
    token_ids = np.array(tokens or [1], np.int32)
    return SlotInit(slot, SamplingParams(**params), token_ids, num_prompt_tokens)  # type: ignore[arg-type]


def sample(sampler: HostSampling, logits: np.ndarray, batch: StepBatch) -> list[int]:
    sampler.begin_step(batch)
    return sampler.sample(logits.astype(np.float32), batch).token_ids.tolist()


def kept_by_reference(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The tokens that one row may draw, in float64 and one at a time."""
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= params.top_p:
            break
        kept.append(int(token))
        mass += weight
    peak = np.exp(scaled.max())
    return {token for token in kept if np.exp(scaled[token]) >= params.min_p * peak}


def test_greedy_is_the_argmax_of_each_row(sampling: MakeSampling) -> None:
    logits = np.random.default_rng(0).normal(size=(5, VOCAB))
    sampler = sampling(VOCAB, 8)
    inits = tuple(slot_init(slot, temperature=0.0) for slot in range(5))
    assert sample(sampler, logits, decode_batch([0, 1, 2, 3, 4], inits=inits)) == logits.argmax(axis=1).tolist()


@settings(max_examples=60)
@given(
    st.floats(0.2, 3.0),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0, 1, 7, 300, VOCAB, 10**9]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.integers(0, 2**63 - 1),
)
def test_only_tokens_that_the_filters_keep_are_drawn(
    sampling: MakeSampling, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = np.random.default_rng(seed % 1000).normal(size=(1, VOCAB)) * 3
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    allowed = kept_by_reference(logits[0].astype(np.float32), params)
    sampler = sampling(VOCAB, 1)
    init = SlotInit(0, params, np.array([1], np.int32), 1)
    for position in range(1, 12):
        inits = (init,) if position == 1 else ()
        (token,) = sample(sampler, logits, decode_batch([0], position, inits))
        assert token in allowed


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 12},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.98, "top_k": 40},
    ],
)
def test_draws_follow_the_distribution_by_chi_square(sampling: MakeSampling, params: dict[str, float]) -> None:
    """12,000 draws of different seeds; the bound is the 1 - 1e-6 quantile of chi-square by Wilson and Hilferty."""
    vocab, draws, width = 60, 12_000, 500
    logits = np.random.default_rng(5).normal(size=vocab).astype(np.float32) * 2
    sampler = sampling(vocab, width)
    counts = np.zeros(vocab)
    for start in range(0, draws, width):
        inits = tuple(slot_init(slot, seed=start + slot, **params) for slot in range(width))
        tokens = sample(sampler, np.tile(logits, (width, 1)), decode_batch(list(range(width)), 3, inits))
        counts += np.bincount(tokens, minlength=vocab)
    kept = sorted(kept_by_reference(logits, SamplingParams(**params)))  # type: ignore[arg-type]
    weights = np.exp(logits[kept].astype(np.float64) / params["temperature"])
    expected = weights / weights.sum() * draws
    assert counts.sum() == counts[kept].sum() == draws
    dof = len(kept) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert statistic < dof * (1 - 2 / (9 * dof) + 4.75 * (2 / (9 * dof)) ** 0.5) ** 3


def test_draw_depends_neither_on_the_batch_nor_on_the_slot(sampling: MakeSampling) -> None:
    rng = np.random.default_rng(1)
    mine = rng.normal(size=VOCAB)
    params = {"temperature": 0.9, "top_p": 0.8, "top_k": 200, "seed": 77, "repetition_penalty": 1.3}
    alone = sampling(VOCAB, 64)
    expected = [
        sample(alone, mine[None], decode_batch([0], p, (slot_init(0, [4, 5], **params),) if p == 2 else ()))[0]
        for p in range(2, 20)
    ]
    crowded = sampling(VOCAB, 64)
    got = []
    for position in range(2, 20):
        others = rng.permutation(np.delete(np.arange(64), 41))[: rng.integers(1, 40)].tolist()
        inits = [slot_init(slot, seed=slot, temperature=0.5 + slot / 20, top_k=slot) for slot in others]
        if position == 2:
            inits.append(slot_init(41, [4, 5], **params))
        where = int(rng.integers(0, len(others) + 1))
        slots = [*others[:where], 41, *others[where:]]
        logits = rng.normal(size=(len(slots), VOCAB)) * 5
        logits[where] = mine
        got.append(sample(crowded, logits, decode_batch(slots, position, tuple(inits)))[where])
    assert got == expected


def test_penalties_and_bias_match_a_plain_reference(sampling: MakeSampling) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=VOCAB).astype(np.float32) * 2
    prompt, generated = [3, 3, 9, 20], [50, 50, 50, 3, 51]
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        logit_bias=((7, 2.5), (9, -100.0)),
    )
    sampler = sampling(VOCAB, 2)
    init = SlotInit(0, params, np.array(prompt + generated, np.int32), len(prompt))
    history = list(generated)
    for step in range(30):
        expected = logits.astype(np.float64)
        for token in set(prompt) | set(history):
            expected[token] *= 1.4 if expected[token] <= 0 else 1 / 1.4
        for token in set(history):
            expected[token] -= 0.3 * history.count(token) + 0.6
        expected[7] += 2.5
        expected[9] -= 100.0
        (token,) = sample(sampler, logits[None], decode_batch([0], 9 + step, (init,) if step == 0 else ()))
        assert token == int(expected.argmax())
        history.append(token)
    assert len(set(history)) > 5


def test_penalties_do_not_count_embeddings_of_the_prompt(sampling: MakeSampling) -> None:
    """Used as an index, FROM_EMBEDDINGS would be the second last token."""
    sampler = sampling(VOCAB, 1)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [FROM_EMBEDDINGS, 5, 6]] = 2.0, 1.9, 1.8
    tokens = [FROM_EMBEDDINGS, FROM_EMBEDDINGS, 5]
    init = slot_init(0, tokens, 2, temperature=0.0, repetition_penalty=3.0, frequency_penalty=1.0)
    assert sample(sampler, logits, decode_batch([0], 2, (init,))) == [VOCAB + FROM_EMBEDDINGS]
    assert sample(sampler, logits, decode_batch([0], 3)) == [6]


@pytest.mark.parametrize("temperatures", [(0.0, 1.0), (0.0, 0.0)])
def test_row_without_finite_logits_fails_alone(sampling: MakeSampling, temperatures: tuple[float, float]) -> None:
    logits = np.random.default_rng(3).normal(size=(4, VOCAB))
    logits[1, 5] = np.nan
    logits[2] = -np.inf
    sampler = sampling(VOCAB, 4)
    inits = tuple(slot_init(slot, temperature=temperatures[slot % 2]) for slot in range(4))
    tokens = sample(sampler, logits, decode_batch([0, 1, 2, 3], inits=inits))
    assert tokens[1] == tokens[2] == NOT_FINITE
    assert tokens[0] == int(logits[0].argmax())
    assert 0 <= tokens[3] < VOCAB


def test_from_slot_is_the_last_token_sampled_for_the_slot(sampling: MakeSampling) -> None:
    sampler = sampling(VOCAB, 4)
    logits = np.zeros((2, VOCAB))
    logits[0, 11], logits[1, 22] = 1, 1
    inits = (slot_init(3, temperature=0.0), slot_init(1, temperature=0.0))
    assert sample(sampler, logits, decode_batch([3, 1], inits=inits)) == [11, 22]
    assert sampler.begin_step(decode_batch([1, 3])).tolist() == [22, 11]


def test_greedy_slot_samples_again_when_its_next_sequence_asks_for_it(sampling: MakeSampling) -> None:
    logits = np.zeros((1, VOCAB))
    logits[0, :8] = 1.0
    drawn = set()
    for seed in range(20):
        sampler = sampling(VOCAB, 1)
        assert sample(sampler, logits, decode_batch([0], inits=(slot_init(0, temperature=0.0),))) == [0]
        init = slot_init(0, temperature=1.0, seed=seed, top_k=8)
        drawn.update(sample(sampler, logits, decode_batch([0], inits=(init,))))
    assert drawn <= set(range(8))
    assert len(drawn) > 1


def test_slot_keeps_nothing_of_its_previous_sequence(sampling: MakeSampling) -> None:
    sampler = sampling(VOCAB, 1)
    logits = np.zeros((1, VOCAB))
    logits[0, 30], logits[0, 31] = 2.0, 1.9
    first = slot_init(0, [30], 0, temperature=0.0, presence_penalty=2.0, logit_bias=((5, 50.0),))
    assert sample(sampler, logits, decode_batch([0], inits=(first,))) == [5]
    assert sample(sampler, logits, decode_batch([0], inits=(slot_init(0, temperature=0.0),))) == [30]


def test_philox_gives_the_published_known_answers() -> None:
    """Random123's kat_vectors for philox4x32-10, first two words, for a key and a counter of zeros."""
    zero = philox_uniform(np.array([0], np.uint64), np.array([0], np.int64))
    expected = ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) * 2.0**-53
    assert zero.tolist() == [expected]


def test_uniform_numbers_are_in_the_unit_interval_and_differ_by_seed_and_position() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100, dtype=np.int64), 100)
    numbers = philox_uniform(seeds, positions)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert len(set(numbers.tolist())) == 10_000
    assert abs(numbers.mean() - 0.5) < 0.02


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-40, 1e-300])
def test_temperature_near_zero_is_greedy(sampling: MakeSampling, temperature: float) -> None:
    logits = np.random.default_rng(4).normal(size=(3, VOCAB)) * 10
    sampler = sampling(VOCAB, 3)
    inits = tuple(slot_init(slot, temperature=temperature, top_p=0.9, min_p=0.1, seed=slot) for slot in range(3))
    assert sample(sampler, logits, decode_batch([0, 1, 2], inits=inits)) == logits.argmax(axis=1).tolist()


def test_strongest_penalties_leave_logits_finite(sampling: MakeSampling) -> None:
    logits = np.full((1, VOCAB), 80.0)
    for repetition_penalty in (0.01, 100.0):
        sampler = sampling(VOCAB, 1)
        init = slot_init(0, [3, 4], 1, temperature=0.5, repetition_penalty=repetition_penalty, frequency_penalty=2.0)
        (token,) = sample(sampler, logits, decode_batch([0], inits=(init,)))
        assert 0 <= token < VOCAB


def test_mask_restricts_its_row_and_leaves_other_rows_unchanged(sampling: MakeSampling) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    allowed = rng.random((2, VOCAB)) < 0.05
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, -VOCAB % 32))), axis=1, bitorder="little").view(np.uint32)
    masks = TokenMasks(np.array([1, 3], np.int32), packed)
    inits = tuple(slot_init(slot, temperature=float(slot > 1), seed=7) for slot in range(4))
    free, masked = sampling(VOCAB, 4), sampling(VOCAB, 4)
    expected = sample(free, logits, decode_batch([0, 1, 2, 3], inits=inits))
    batch = decode_batch([0, 1, 2, 3], inits=inits)
    masked.begin_step(batch)
    tokens = masked.sample(logits, batch, masks).token_ids.tolist()
    assert tokens[0] == expected[0]
    assert tokens[2] == expected[2]
    assert tokens[1] == int(np.where(allowed[0], logits[1], -np.inf).argmax())
    assert allowed[1, tokens[3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_masked_row_has_its_own_mask_in_any_position(sampling: MakeSampling, temperature: float) -> None:
    rng = np.random.default_rng(5)
    num_rows, masked_rows = 6, [0, 2, 5]
    logits = rng.normal(size=(num_rows, VOCAB)).astype(np.float32)
    allowed = rng.random((len(masked_rows), VOCAB)) < 0.3
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, -VOCAB % 32))), axis=1, bitorder="little").view(np.uint32)
    hidden = logits.copy()
    hidden[masked_rows] = np.where(allowed, logits[masked_rows], -np.inf)
    given = logits.copy()
    batch = decode_batch(
        list(range(num_rows)),
        inits=tuple(slot_init(slot, temperature=temperature * (slot != 2), seed=slot) for slot in range(num_rows)),
    )
    with_masks, without = sampling(VOCAB, num_rows), sampling(VOCAB, num_rows)
    for sampler in (with_masks, without):
        sampler.begin_step(batch)
    tokens = with_masks.sample(given, batch, TokenMasks(np.array(masked_rows, np.int32), packed)).token_ids
    assert tokens.tolist() == without.sample(hidden, batch).token_ids.tolist()
    assert np.array_equal(given, logits)


def test_mask_does_not_hide_nan_logits(sampling: MakeSampling) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 5] = np.nan
    bits = np.zeros((2, -(-VOCAB // 32)), np.uint32)
    bits[:, 0] = 2  # only token 1
    batch = decode_batch([0, 1], inits=tuple(slot_init(slot, temperature=0.0) for slot in range(2)))
    sampler = sampling(VOCAB, 2)
    sampler.begin_step(batch)
    tokens = sampler.sample(logits, batch, TokenMasks(np.arange(2, dtype=np.int32), bits)).token_ids
    assert tokens.tolist() == [NOT_FINITE, 1]


def test_logprobs_are_the_log_softmax_of_raw_logits_for_rows_that_request_them(sampling: MakeSampling) -> None:
    logits = np.random.default_rng(4).normal(size=(3, VOCAB)).astype(np.float32) * 4
    logits[2, [5, 9, 40]] = logits[2].max() + 1  # equal values are ordered by id
    sampler = sampling(VOCAB, 3)
    bias = ((17, 100.0),)
    inits = (
        slot_init(0, temperature=0.0, num_logprobs=0, logit_bias=bias),
        slot_init(1, temperature=0.0),
        slot_init(2, temperature=0.0, num_logprobs=4),
    )
    batch = decode_batch([0, 1, 2], inits=inits)
    sampler.begin_step(batch)
    output = sampler.sample(logits, batch)
    oracle = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    assert output.token_ids.tolist() == [17, int(logits[1].argmax()), 5]
    assert output.logprobs is not None
    assert output.logprobs.rows.tolist() == [0, 2]
    np.testing.assert_allclose(output.logprobs.chosen, [oracle[0, 17], oracle[2, 5]], rtol=1e-5)
    assert output.logprobs.ranks.tolist() == [int((oracle[0] >= oracle[0, 17]).sum()), 3]
    assert output.logprobs.top_ids[1, :3].tolist() == [5, 9, 40]
    np.testing.assert_allclose(output.logprobs.top[0], oracle[0].topk(4).values, rtol=1e-5)


def test_named_tokens_are_reported_in_their_order_instead_of_the_top_ones(sampling: MakeSampling) -> None:
    logits = np.random.default_rng(5).normal(size=(4, VOCAB)).astype(np.float32) * 4
    logits[1, 3] = -np.inf
    named = [(7, 2, 5, 11), (3,), (), (1, 2)]
    bias = ((2, 100.0),)  # log probabilities are those before the bias
    inits = [
        slot_init(0, temperature=0.0, num_logprobs=0, logprob_token_ids=named[0], logit_bias=bias),
        slot_init(1, temperature=0.9, num_logprobs=2, logprob_token_ids=named[1]),
        slot_init(2, temperature=0.0, num_logprobs=3),
        slot_init(3, temperature=0.0, logprob_token_ids=named[3]),
    ]
    sampler = sampling(VOCAB, 4)
    batch = decode_batch([0, 1, 2, 3], inits=tuple(inits))
    sampler.begin_step(batch)
    found = sampler.sample(logits, batch).logprobs
    assert found is not None
    oracle = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    assert found.rows.tolist() == [0, 1, 2]
    expected = [*named[:2], tuple(np.argsort(-oracle[2])[:3].tolist())]
    for row, ids in enumerate(expected):
        assert found.top_ids[row, : len(ids)].tolist() == list(ids)
        np.testing.assert_allclose(found.top[row, : len(ids)], oracle[row, list(ids)], rtol=1e-5)
    again = decode_batch([0], inits=(slot_init(0, temperature=0.0, num_logprobs=1),))  # the slot's next owner
    sampler.begin_step(again)
    found = sampler.sample(logits[:1], again).logprobs
    assert found is not None
    assert found.top_ids.tolist() == [[int(oracle[0].argmax())]]


@pytest.mark.parametrize("width", [1, 3])
def test_top_logprobs_with_ties_report_the_lowest_ids(sampling: MakeSampling, width: int) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    sampler = sampling(VOCAB, 1)
    batch = decode_batch([0], inits=(slot_init(0, temperature=0.0, num_logprobs=width),))
    sampler.begin_step(batch)
    output = sampler.sample(logits, batch)
    assert output.logprobs is not None
    assert output.logprobs.top_ids.tolist() == [list(range(width))]


def test_typical_sampling_keeps_the_tokens_nearest_to_the_entropy(sampling: MakeSampling) -> None:
    probabilities = np.array([0.55, 0.25, 0.1, 0.05, 0.05])
    surprise = -np.log(probabilities)
    nearest = np.argsort(np.abs(surprise - (probabilities * surprise).sum()))
    kept = set(nearest[: int(np.searchsorted(np.cumsum(probabilities[nearest]), 0.2)) + 1].tolist())
    assert 0 not in kept  # the likeliest token is far from typical here
    sampler = sampling(5, 400)
    inits = tuple(slot_init(slot, temperature=1.0, typical_p=0.2, seed=slot) for slot in range(400))
    tokens = sample(sampler, np.tile(np.log(probabilities), (400, 1)), decode_batch(list(range(400)), inits=inits))
    assert set(tokens) == kept


def test_min_p_keeps_the_likeliest_token_that_typical_sampling_left(sampling: MakeSampling) -> None:
    logits = np.zeros((1, VOCAB))
    logits[0, 0], logits[0, 300] = 5.5, 0.1
    sampler = sampling(VOCAB, 1)
    init = slot_init(0, typical_p=0.2, min_p=0.1)
    assert sample(sampler, logits, decode_batch([0], inits=(init,))) == [300]
