"""The contract of passes that pool: a vector depends on its own sequence only, and on all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backend.forward_pass import SlotInit
from penstock.tools.forward_pass_contract.steps import GREEDY, TOLERANCE, Floats, StepRow, StepRunner

_LENGTHS = (1, 2, 3, 17, 5, 30, 1, 9)


@pytest.fixture
def pooling(forward_pass: Any) -> StepRunner:
    if not forward_pass.spec.pooled:
        pytest.skip("this pass pools nothing")
    return StepRunner(forward_pass)


def _whole(pooling: StepRunner, tokens: list[int], kind: str, second_start: int = 0, slot: int = 0) -> StepRow:
    pages, init = [], None
    if pooling.forward_pass.spec.kv_bytes_per_token:
        pages = [30 * slot + page for page in range(len(pooling.random_pages(len(tokens))))]
        init = SlotInit(slot, GREEDY, np.array(tokens, np.int32), len(tokens))
    return StepRow(tokens, 0, pages, slot, False, init, pooled=(kind, second_start))


def _alone(pooling: StepRunner, tokens: list[int], kind: str, second_start: int = 0) -> Floats:
    (vector,) = pooling.pool([_whole(pooling, tokens, kind, second_start)])
    return vector


def test_each_kind_has_its_width_and_finite_values(pooling: StepRunner) -> None:
    for kind, width in pooling.forward_pass.spec.pooled.items():
        for length in (1, 7):
            vector = _alone(pooling, pooling.random_prompt(length), kind)
            assert vector.shape == ((length, width) if kind.startswith("token_") else (width,))
            assert vector.dtype == np.float32
            assert np.isfinite(vector).all()


def test_vector_does_not_depend_on_the_other_rows(pooling: StepRunner) -> None:
    kinds = list(pooling.forward_pass.spec.pooled)
    prompts = [pooling.random_prompt(length) for length in _LENGTHS]
    tasks = [
        (prompt, kinds[number % len(kinds)], len(prompt) // 2 if number % 3 else 0)
        for number, prompt in enumerate(prompts)
    ]
    together = pooling.pool([_whole(pooling, *task, slot=slot) for slot, task in enumerate(tasks)])
    for task, vector in zip(tasks, together, strict=True):
        np.testing.assert_allclose(vector, _alone(pooling, *task), rtol=TOLERANCE, atol=TOLERANCE)


def test_vector_depends_on_each_token(pooling: StepRunner) -> None:
    prompt = pooling.random_prompt(12)
    for kind in pooling.forward_pass.spec.pooled:
        vector = _alone(pooling, prompt, kind)
        for place in (0, 6, 11):
            other = list(prompt)
            other[place] = (other[place] + 1) % pooling.forward_pass.spec.vocab_size
            assert np.abs(_alone(pooling, other, kind) - vector).max() > 0, f"kind {kind}, token {place}"


@pytest.mark.parametrize("chunk", [1, 5])
def test_vector_of_a_sequence_in_chunks_is_that_of_the_whole(pooling: StepRunner, chunk: int) -> None:
    if not pooling.forward_pass.spec.kv_bytes_per_token:
        pytest.skip("a pass without a KV cache computes each sequence whole")
    prompt = pooling.random_prompt(17)
    for kind in pooling.forward_pass.spec.pooled:
        whole = _alone(pooling, prompt, kind)
        first = _whole(pooling, prompt, kind)
        for start in range(0, len(prompt), chunk):
            is_last = start + chunk >= len(prompt)
            part = prompt[start : start + chunk]
            init, pooled = first.init if start == 0 else None, (kind, 0) if is_last else None
            found = pooling.pool([StepRow(part, start, first.pages, 0, False, init, pooled=pooled)])
        np.testing.assert_allclose(found[0], whole, rtol=TOLERANCE, atol=TOLERANCE)
