"""DRY, XTC, top-n-sigma and dynamic temperature against plain references, written from llama.cpp's description."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.backend.forward_pass import FROM_EMBEDDINGS, SamplingParams, SlotInit
from penstock.backend.sampling.numpy_sampler import NumpySampler
from penstock.backend.sampling.repetition import Repetitions
from penstock.backend.sampling.sampler import HostSampling
from tests.backend.sampling.conftest import MakeSampling
from tests.backend.sampling.test_sampler import decode_batch, sample

Runs = list[tuple[int, ...]]


def packed(breakers: Runs) -> bytes:
    return np.array([each for run in breakers for each in (*run, -1)], np.int32).tobytes()


def dry_by_reference(tokens: list[int], breakers: Runs, params: SamplingParams) -> dict[int, float]:
    """Return each token's penalty. Compares every end of the text with every place in it."""
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    limit = len(tokens)
    for first in reversed(range(len(tokens))):
        ends = [first + len(run) for run in breakers if tuple(tokens[first : first + len(run)]) == run]
        if tokens[first] == FROM_EMBEDDINGS or ends:
            limit = len(tokens) - max(ends, default=first + 1)
            break
    longest: dict[int, int] = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, limit) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= params.dry_allowed_length and tokens[end] != FROM_EMBEDDINGS:
            longest[tokens[end]] = max(longest.get(tokens[end], 0), length)
    if limit < params.dry_allowed_length:
        return {}
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in longest.items()
        if (token,) not in breakers
    }


def test_dry_penalises_what_would_continue_the_longest_repetition() -> None:
    """llama.cpp's own example: a b c c b c y a b c."""
    a, b, c, y = range(4)
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    logits = np.zeros(5, np.float32)
    Repetitions(params, np.array([a, b, c, c, b, c, y, a, b, c], np.int32), 5).penalise(logits, 10)
    assert logits.tolist() == [0.0, -1.0, -4.0, -2.0, 0.0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(dry_multiplier=0.8),
        SamplingParams(dry_multiplier=2.0, dry_base=1.2, dry_allowed_length=0, dry_penalty_last_n=7),
        SamplingParams(dry_multiplier=1.5, dry_allowed_length=1, dry_penalty_last_n=0),
        SamplingParams(dry_multiplier=3.0, dry_base=1.0, dry_allowed_length=3, dry_penalty_last_n=200),
    ],
)
@pytest.mark.parametrize("breakers", [[], [(2,)], [(0, 1), (3, 3, 2), (0, 1, 1), (4,)]])
def test_dry_follows_the_reference_as_the_sequence_grows(
    sampling: MakeSampling, params: SamplingParams, breakers: Runs
) -> None:
    """Greedy, over a vocabulary so small that much repeats; more tokens than there is room for at first."""
    rng = np.random.default_rng(len(breakers))
    vocab, params = 6, replace(params, temperature=0.0, dry_breakers=packed(breakers))
    tokens = [0, 1, FROM_EMBEDDINGS, 1, 2, 0, 1]
    sampler = sampling(vocab, 1)
    inits: tuple[SlotInit, ...] = (SlotInit(0, params, np.array(tokens, np.int32), 6),)
    for _ in range(300):
        logits = rng.normal(size=(1, vocab)).astype(np.float32)
        changed = logits[0].copy()
        for token, penalty in dry_by_reference(tokens, breakers, params).items():
            changed[token] -= np.float32(penalty)
        (got,) = sample(sampler, logits, decode_batch([0], len(tokens) - 1, inits))
        assert got == changed.argmax()
        tokens.append(got)
        inits = ()


def test_strongest_dry_penalty_leaves_a_token(sampling: MakeSampling) -> None:
    params = SamplingParams(temperature=0.0, dry_multiplier=100.0, dry_base=100.0, dry_allowed_length=0)
    init = SlotInit(0, params, np.zeros(200, np.int32), 200)
    logits = np.full((1, 3), -np.inf)
    logits[0, 0] = 1.0
    assert sample(sampling(3, 1), logits, decode_batch([0], 199, (init,))) == [0]


def probabilities_by_reference(logits: np.ndarray, params: SamplingParams, *, excludes: bool) -> dict[int, float]:
    """Return what may be drawn, in float64 over a sorted list."""
    deviation = logits.std()
    left = [token for token in np.argsort(-logits) if logits[token] >= logits.max() - params.top_n_sigma * deviation]
    if not params.top_n_sigma:
        left = np.argsort(-logits).tolist()
    left = left[: params.top_k or None]
    is_last = params.xtc_probability or params.dynatemp_range
    temperature = 1.0 if is_last else params.temperature
    left = [token for token in left if logits[token] >= logits.max() + temperature * math.log(params.min_p or 1e-99)]
    weights = np.exp(logits[left] / temperature)
    likely = [token for token, p in zip(left, weights / weights.sum(), strict=True) if p >= params.xtc_threshold]
    if excludes and len(likely) > 1:
        left = left[len(likely) - 1 :]
    weights = np.exp(logits[left])
    temperature, spread = params.temperature, params.dynatemp_range
    if spread and len(left) > 1:
        p = weights / weights.sum()
        entropy = -(p * np.log(p)).sum() / math.log(len(left))
        lowest = max(0.0, temperature - spread)
        temperature = lowest + (temperature + spread - lowest) * entropy**params.dynatemp_exponent
    weights = np.exp((logits[left] - logits[left].max()) / temperature)
    return dict(zip(map(int, left), (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_n_sigma=1.0),
        SamplingParams(temperature=1.5, xtc_probability=1.0, xtc_threshold=0.05),
        SamplingParams(temperature=0.6, xtc_probability=0.3, top_k=9, min_p=0.02),
        SamplingParams(temperature=1.0, dynatemp_range=0.8, dynatemp_exponent=2.0, min_p=0.01),
        SamplingParams(temperature=0.5, dynatemp_range=2.0, xtc_probability=0.5, top_n_sigma=1.5, top_k=20),
    ],
)
def test_draws_follow_the_reference_by_chi_square(sampling: MakeSampling, params: SamplingParams) -> None:
    """10,000 draws of different seeds; the bound is the 1 - 1e-6 quantile of chi-square by Wilson and Hilferty."""
    vocab, draws, width = 40, 10_000, 500
    logits = (np.random.default_rng(8).normal(size=vocab) * 2).astype(np.float32)
    sampler, counts = sampling(vocab, width), Counter[int]()
    for start in range(0, draws, width):
        inits = tuple(
            SlotInit(slot, replace(params, seed=start + slot), np.array([1], np.int32), 1) for slot in range(width)
        )
        counts.update(sample(sampler, np.tile(logits, (width, 1)), decode_batch(list(range(width)), 3, inits)))
    expected = Counter[int]()
    for excludes, share in ((True, params.xtc_probability), (False, 1 - params.xtc_probability)):
        if share:
            found = probabilities_by_reference(logits.astype(np.float64), params, excludes=excludes)
            expected.update({token: share * p * draws for token, p in found.items()})  # type: ignore[dict-item]
    assert counts.keys() <= expected.keys()
    likely = [token for token, number in expected.items() if number > 5]
    dof = len(likely) - 1
    statistic = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in likely)
    assert statistic < dof * (1 - 2 / (9 * dof) + 4.75 * (2 / (9 * dof)) ** 0.5) ** 3


def test_greedy_request_ignores_exclusion_and_dynamic_temperature(sampling: MakeSampling) -> None:
    params = SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0, dynatemp_range=2.0)
    logits = np.random.default_rng(0).normal(size=(1, 50))
    init = SlotInit(0, params, np.array([1], np.int32), 1)
    assert sample(sampling(50, 1), logits, decode_batch([0], 3, (init,))) == [int(logits.argmax())]


@pytest.mark.parametrize(("vocab", "scale"), [(700, 3.0), (700, 0.01), (20_000, 1.0)])
def test_kernels_draw_the_tokens_of_numpy(sampling: MakeSampling, vocab: int, scale: float) -> None:
    """Any settings together. The first tokens are likely, so that much repeats."""
    if isinstance(sampling(vocab, 1)._sampler, NumpySampler):
        pytest.skip("numpy is the reference")
    rng, num_rows, small = np.random.default_rng(3), 12, 8
    kernels, plain = sampling(vocab, num_rows), HostSampling(vocab, num_rows)
    inits = tuple(any_init(rng, slot, small) for slot in range(num_rows))
    for step in range(60):
        logits = rng.normal(size=(num_rows, vocab)) * scale
        logits[:, :small] += rng.normal(size=(num_rows, small)) * 6 + 6
        batch = decode_batch(list(range(num_rows)), 11 + step, inits if step == 0 else ())
        assert sample(kernels, logits, batch) == sample(plain, logits, batch)


def any_init(rng: np.random.Generator, slot: int, small: int) -> SlotInit:
    """12 tokens below small, of which some are embeddings."""
    draw = rng.choice
    runs = [tuple(rng.integers(0, small, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(0, 5))]
    params = SamplingParams(
        temperature=float(draw([0, 0.2, 0.8, 2])),
        top_p=float(draw([1, 0.95, 0.5])),
        top_k=int(draw([0, 1, 40, 300])),
        min_p=float(draw([0, 0.02, 0.5])),
        typical_p=float(draw([1, 1, 0.9, 0.3])),
        repetition_penalty=float(draw([1, 1.3])),
        seed=int(rng.integers(2**62)),
        xtc_probability=float(draw([0, 0.5, 1])),
        xtc_threshold=float(draw([0, 0.01, 0.1, 0.5])),
        top_n_sigma=float(draw([0, 1, 2.5])),
        dynatemp_range=float(draw([0, 0.5, 2])),
        dynatemp_exponent=float(draw([0.5, 1, 3])),
        dry_multiplier=float(draw([0, 0.8, 5])),
        dry_base=float(draw([1, 1.75, 3])),
        dry_allowed_length=int(draw([0, 1, 2, 4])),
        dry_penalty_last_n=int(draw([-1, 5, 300])),
        dry_breakers=packed(runs),
    )
    tokens = rng.integers(0, small, 12).astype(np.int32)
    tokens[: draw([0, 4])] = FROM_EMBEDDINGS
    return SlotInit(slot, params, tokens, 12)
