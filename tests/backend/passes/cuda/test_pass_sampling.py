"""The CUDA pass samples by the slot's parameters only; other rows of the step do not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import NOT_FINITE, SamplingParams, TokenMasks
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from tests.backend.passes.cuda.tiny_models import (
    VOCAB_SIZE,
    checkpoint,
    generated,
    greedy_choices,
    make_driver,
    options,
    prompts,
)
from tests.backend.passes.decoder.driver import GREEDY, Driver

if TYPE_CHECKING:
    from tests.backend.passes.decoder.driver import DriverRow

DRAWN = SamplingParams(temperature=1.3, top_p=0.9, top_k=40, min_p=0.01, seed=1 << 40)
PENALISED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((5, 3.0), (90, -100.0), (5, 1.0)),
)


def run(driver: Driver, rows: list[DriverRow], count: int = 10) -> list[list[int]]:
    driver.prefill()
    driver.decode(count)
    return [generated(row) for row in rows]


def test_a_draw_depends_only_on_seed_and_position() -> None:
    prompt, *others = prompts((20, 3, 33, 11), seed=4)
    alone = make_driver()
    (expected,) = run(alone, [alone.add(prompt, DRAWN)])
    among = make_driver(seed=1)
    for other_prompt in others:
        among.add(other_prompt, replace(DRAWN, seed=other_prompt[0]))
    again, other = among.add(prompt, DRAWN), among.add(prompt, replace(DRAWN, seed=7))
    tokens, other_tokens = run(among, [again, other])
    assert tokens == expected
    assert other_tokens != expected


def test_penalties_and_biases_equal_the_cpu_pass() -> None:
    on_cpu = Driver(CpuDecoderPass.load(checkpoint("llama3"), options()), num_pages=32, page_size=16)
    tokens = []
    for driver in (make_driver(), on_cpu):
        rows = [driver.add(prompt, PENALISED) for prompt in prompts((4, 25), seed=5)]
        rows.append(driver.add(prompts((9,))[0]))
        tokens.append(run(driver, rows, 20))
    assert tokens[0] == tokens[1]
    assert tokens[0][2] != tokens[0][0]


def test_new_slots_too_large_for_one_copy_go_ahead_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for most_ints in (10**6, 30):
        driver = make_driver()
        monkeypatch.setattr(driver.forward_pass._sampling, "_max_update_ints", most_ints)
        rows = [driver.add(prompt, PENALISED) for prompt in prompts((4, 25, 40), seed=6)]
        tokens.append(run(driver, rows))
    assert tokens[0] == tokens[1]


def test_log_probabilities_come_from_the_raw_logits() -> None:
    driver = make_driver()
    with_logprobs = replace(PENALISED, num_logprobs=3)
    named = (9, 2, 31, 4)
    params = [GREEDY, with_logprobs, replace(DRAWN, num_logprobs=0, logprob_token_ids=named)]
    rows = [driver.add(prompt, sampling) for prompt, sampling in zip(prompts((5, 18, 9)), params, strict=True)]
    batch = driver.build([(row, row.num_prompt_tokens) for row in rows])
    logits = driver.forward_pass.forward(batch)
    expected = torch.from_numpy(driver.forward_pass.host_logits(logits)).double().log_softmax(dim=1).numpy()
    output = driver.forward_pass.sample(logits, batch).wait()
    found = output.logprobs
    assert found is not None
    assert found.rows.tolist() == [1, 2]
    for place, row in enumerate(found.rows.tolist()):
        token = output.token_ids[row]
        assert found.chosen[place] == pytest.approx(expected[row, token], abs=1e-4)
        assert found.ranks[place] == (expected[row] >= expected[row, token]).sum()
        ids = np.argsort(-expected[row])[:3].tolist() if row == 1 else list(named)
        assert found.top_ids[place, : len(ids)].tolist() == ids
        np.testing.assert_allclose(found.top[place, : len(ids)], expected[row, ids], atol=1e-4)


def test_a_masked_row_takes_the_best_allowed_token() -> None:
    driver = make_driver()
    rows = [driver.add(prompt) for prompt in prompts((5, 18, 9))]
    batch = driver.build([(row, row.num_prompt_tokens) for row in rows])
    logits = driver.forward_pass.forward(batch)
    host = driver.forward_pass.host_logits(logits)
    allowed = np.zeros((2, VOCAB_SIZE), np.bool_)
    allowed[0, [3, 17, 199]] = True
    allowed[1, ::7] = True
    padded = np.zeros((2, -(-VOCAB_SIZE // 32) * 32), np.bool_)
    padded[:, :VOCAB_SIZE] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    masks = TokenMasks(np.array([0, 2], np.int32), bits)
    tokens = driver.forward_pass.sample(logits, batch, masks).wait().token_ids
    host[[0, 2]] = np.where(allowed, host[[0, 2]], -np.inf)
    assert tokens.tolist() == host.argmax(axis=1).tolist()


def test_a_row_without_a_finite_logit_gets_no_token_and_does_not_affect_others() -> None:
    driver = make_driver()
    with torch.inference_mode():
        driver.forward_pass._model._embedding[150] = float("nan")
    good, bad = driver.add([3, 4, 5]), driver.add([3, 150, 5])
    batch = driver.build([(good, 3), (bad, 3)])
    tokens = driver.forward_pass.sample(driver.forward_pass.forward(batch), batch).wait().token_ids.tolist()
    good.tokens.append(tokens[0])
    assert [tokens[0]] == greedy_choices("llama3", good)
    assert tokens[1] == NOT_FINITE
