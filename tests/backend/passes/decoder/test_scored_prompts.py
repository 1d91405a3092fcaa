"""Log probabilities of prompts from prefill, by each implementation, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import ScoredTokens
from penstock.backend.sampling.logprobs import token_logprobs
from tests.backend.passes.conftest import MakeOps
from tests.backend.passes.cpu.ops_harness import BASE, BF16, FP32, OpsHarness, randn
from tests.backend.passes.decoder.driver import Driver, joined
from tests.backend.passes.decoder.test_decoder_pass import make_pass, oracle_logits, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import TokenLogprobs

LENGTHS = (2, 7, 17, 70)


def score(driver: Driver, batch: Sequence[Sequence[int]], chunk: int | None = None) -> list[TokenLogprobs]:
    rows = [driver.add(prompt) for prompt in batch]
    for row in rows:
        row.is_scored = True
    driver.prefill(chunk)
    return [joined(driver.scores[row.slot]) for row in rows]


def assert_scores(found: TokenLogprobs, logits: NDArray[np.float32], prompt: Sequence[int]) -> None:
    """logits: those of transformers, [n, vocab]."""
    expected = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), dim=-1).numpy()
    chosen = expected[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(found.chosen, chosen, atol=1e-3, rtol=0)
    for margin, bound in ((1e-3, np.less_equal), (-1e-3, np.greater_equal)):
        assert bound(found.ranks, (expected >= chosen[:, None] - margin).sum(axis=1)).all()
    np.testing.assert_allclose(found.top, -np.sort(-expected, axis=1)[:, :3], atol=1e-3, rtol=0)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, found.top_ids, axis=1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("architecture", ["llama3", "mistral", "gemma2"])
def test_prompts_are_scored_as_by_transformers(architecture: str, chunk: int | None, make_ops: MakeOps) -> None:
    driver = Driver(make_pass(architecture, make_ops), num_pages=64, page_size=8)
    batch = prompts(LENGTHS)
    for prompt, found in zip(batch, score(driver, batch, chunk), strict=True):
        assert_scores(found, oracle_logits(architecture, prompt), prompt)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_scores_have_the_same_bits_in_any_chunks_and_beside_any_rows(
    dtype: torch.dtype, make_deterministic: MakeOps
) -> None:
    batch = prompts((19, 70, 33))
    alone = [score(Driver(make_pass("llama3", make_deterministic, dtype), 64, 8), [prompt])[0] for prompt in batch]
    for chunk in (None, 7):
        driver = Driver(make_pass("llama3", make_deterministic, dtype), 64, 8)
        driver.add(prompts((30,), seed=1)[0])
        driver.prefill()
        for found, expected in zip(score(driver, batch, chunk), alone, strict=True):
            for name in ("chosen", "ranks", "top_ids", "top"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_scoring_changes_neither_logits_nor_tokens(make_deterministic: MakeOps) -> None:
    """Its own row and others stay as they are, in the step that scores, and in those after it."""
    answers = []
    for is_scored in (False, True):
        driver = Driver(make_pass("llama3", make_deterministic), 64, 8)
        driver.add(prompts((9,), seed=2)[0])
        driver.prefill()
        rows = [driver.add(prompt) for prompt in prompts((40, 12))]
        rows[0].is_scored = is_scored
        logits = [*driver.prefill(chunk=16).values()]
        driver.decode(5)
        answers.append((np.array(logits), [row.tokens for row in driver.rows]))
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    assert answers[0][1] == answers[1][1]


@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_scores_equal_float64_also_with_ties_and_infinite_logits(num_top: int, make_ops: MakeOps) -> None:
    """Tokens 40 to 59 have equal logits, 70 to 79 none at all."""
    num_rows, hidden, vocab_size = 45, BASE.hidden_size, BASE.vocab_size
    harness = OpsHarness(make_ops(BASE, FP32))
    harness.begin(num_rows)
    x, weight = randn(num_rows, hidden, seed=1), randn(vocab_size, hidden, seed=2)
    weight[40:60] = weight[40]
    bias = torch.zeros(vocab_size)
    bias[70:80] = -torch.inf
    x[7] = torch.nan
    packed = harness.ops.pack_linear(weight, bias)
    normed = harness.put("_hidden", x)
    logits = harness.get("_logits", harness.ops.logits(normed, packed), num_rows).numpy().copy()
    next_ids = np.random.default_rng(0).integers(0, vocab_size, num_rows).astype(np.int32)
    next_ids[:3] = 45, 59, 75
    scored = ScoredTokens(np.arange(num_rows, dtype=np.int32), next_ids, num_top)
    found = harness.ops.score(normed, 0, scored, lambda rows: harness.ops.logits(rows, packed))
    expected = token_logprobs(logits, next_ids, np.arange(num_rows), num_top)
    finite = np.arange(num_rows) != 7
    assert np.isnan(found.chosen[7])
    np.testing.assert_allclose(found.chosen[finite], expected.chosen[finite], atol=2e-6, rtol=1e-6)
    np.testing.assert_array_equal(found.ranks[finite], expected.ranks[finite])
    np.testing.assert_array_equal(found.top_ids[finite], expected.top_ids[finite])
    np.testing.assert_allclose(found.top[finite], expected.top[finite], atol=2e-6, rtol=1e-6)
