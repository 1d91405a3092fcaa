"""The contract of passes that apply adapters: a row uses its own, or none, whatever the rows beside it use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backend.forward_pass import FROM_SLOT, NO_ADAPTER, SlotInit
from penstock.tools.forward_pass_contract.steps import GREEDY, NUM_PAGES, Floats, StepRow, StepRunner, is_same

_CHOICES = (NO_ADAPTER, 0, 1)
_LENGTH = 19


@pytest.fixture
def adapted(forward_pass: Any) -> StepRunner:
    if len(forward_pass.spec.adapter_ranks) < 2:
        pytest.skip("this pass has no two adapters")
    return StepRunner(forward_pass)


def _expected(adapted: StepRunner, prompt: list[int], adapter: int) -> tuple[Floats, Floats]:
    """Logits after the prompt, and after the token sampled there; of a sequence that runs alone, in slot 0."""
    pages = adapted.random_pages(len(prompt) + 1)
    init = SlotInit(0, GREEDY, np.array(prompt, np.int32), len(prompt))
    first, _ = adapted.step([StepRow(prompt, 0, pages, 0, init=init, adapter=adapter)])
    second, _ = adapted.step([StepRow([FROM_SLOT], len(prompt), pages, 0, adapter=adapter)])
    return first[0].copy(), second[0].copy()


def test_spec_has_a_rank_for_each_adapter(adapted: StepRunner) -> None:
    assert all(rank >= 1 for rank in adapted.forward_pass.spec.adapter_ranks)


def test_rows_of_one_step_use_their_own_adapters(adapted: StepRunner) -> None:
    """The same prompt in three slots, whole and in chunks; one of them without an adapter."""
    prompt = adapted.random_prompt(_LENGTH)
    expected = [_expected(adapted, prompt, adapter) for adapter in _CHOICES]
    assert not any(is_same(expected[0][step], expected[other][step]) for other in (1, 2) for step in (0, 1))
    assert not is_same(expected[1][0], expected[2][0])
    shuffled = adapted.rng.permutation(NUM_PAGES).tolist()
    pages = [shuffled[20 * slot : 20 * slot + 20] for slot in range(3)]
    for first in (_LENGTH, 7):  # the second time, rows with adapters have chunks of other lengths
        steps = [[StepRow([], 0, pages[slot], slot) for slot in range(3)] for _ in range(2)]
        for slot, adapter in enumerate(_CHOICES):
            init = SlotInit(slot, GREEDY, np.array(prompt, np.int32), _LENGTH)
            end = min(_LENGTH, first + slot)
            steps[0][slot] = StepRow(prompt[:end], 0, pages[slot], slot, end == _LENGTH, init, adapter=adapter)
            steps[1][slot] = StepRow(prompt[end:], end, pages[slot], slot, adapter=adapter)
        logits, _ = adapted.step(steps[0])
        if first < _LENGTH:
            logits, _ = adapted.step(steps[1])
        following, _ = adapted.step(
            [StepRow([FROM_SLOT], _LENGTH, pages[slot], slot, adapter=_CHOICES[slot]) for slot in (2, 0, 1)]
        )
        for slot in range(3):
            assert is_same(logits[slot], expected[slot][0])
        for row, slot in enumerate((2, 0, 1)):
            assert is_same(following[row], expected[slot][1])


def test_row_without_an_adapter_has_the_same_bits_beside_rows_with_one(adapted: StepRunner) -> None:
    prompt, other = adapted.random_prompt(_LENGTH), adapted.random_prompt(5)
    shuffled = adapted.rng.permutation(NUM_PAGES).tolist()
    pages, others_pages = shuffled[:20], shuffled[20:40]
    inits = [SlotInit(slot, GREEDY, np.zeros(1, np.int32), 1) for slot in range(2)]
    rows = [StepRow(prompt, 0, pages, 0, True, inits[0]), StepRow(other, 0, others_pages, 1, True, inits[1])]
    alone, _ = adapted.step(rows)
    alone = alone.copy()
    rows[1].adapter = 1
    beside, _ = adapted.step(rows)
    assert np.array_equal(alone[0], beside[0])
    assert not is_same(alone[1], beside[1])
