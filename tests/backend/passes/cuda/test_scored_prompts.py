"""Log probabilities of prompts from prefill, on the emulator: in blocks of at most 6 rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, make_driver, options, oracle_logits, prompts
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.test_scored_prompts import assert_scores, score


@pytest.mark.parametrize(("architecture", "chunk"), [("llama3", None), ("mistral", 19), ("llama-tied", 1)])
def test_prompts_are_scored_as_by_transformers(architecture: str, chunk: int | None) -> None:
    driver = make_driver(architecture)
    batch = prompts((2, 7, 17, 40))
    for prompt, found in zip(batch, score(driver, batch, chunk), strict=True):
        assert_scores(found, oracle_logits(architecture, prompt), prompt)


def test_scoring_changes_no_logits_hidden_states_or_tokens() -> None:
    """Beside rows that decode, and rows whose prompts are not finished."""
    answers = []
    for is_scored in (False, True):
        driver = make_driver()
        states = []

        def read(logits: torch.Tensor, driver: Driver = driver, states: list[object] = states) -> np.ndarray:
            states.append(driver.forward_pass.host_hidden_states(logits))
            return driver.forward_pass.host_logits(logits)  # type: ignore[no-any-return]

        driver.read = read
        for prompt in prompts((9, 40, 12)):
            driver.add(prompt)
        driver.rows[1].is_scored = driver.rows[2].is_scored = is_scored
        logits = []
        for counts in ((9, 7, 12), (1, 33, 1), (1, 1, 1)):
            logits += driver.step(list(zip(driver.rows, counts, strict=True))).values()
        assert len(driver.scores) == (2 if is_scored else 0)
        answers.append((np.array(logits), np.concatenate(states), [row.tokens for row in driver.rows]))
    plain, scored = answers
    np.testing.assert_allclose(scored[0], plain[0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(scored[1], plain[1], atol=1e-4, rtol=0)
    assert scored[2] == plain[2]


def test_deterministic_scores_have_the_same_bits_in_any_chunks_and_beside_any_rows() -> None:
    batch = prompts((19, 33, 12))

    def make() -> Driver:
        made = EmulatedCudaPass.load(checkpoint("qwen3"), replace(options("bf16"), deterministic=True))
        return Driver(made, num_pages=32, page_size=16)

    alone = [score(make(), [prompt])[0] for prompt in batch]
    driver = make()
    driver.add(prompts((30,), seed=1)[0])
    driver.prefill()
    for found, expected in zip(score(driver, batch, chunk=7), alone, strict=True):
        for name in ("chosen", "ranks", "top_ids", "top"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_logits_that_are_not_finite_give_nan() -> None:
    driver = make_driver()
    with torch.inference_mode():
        driver.forward_pass._model._lm_head.weight[5, 0] = torch.inf
    (found,) = score(driver, prompts((9,)))
    assert np.isnan(found.chosen).all()
