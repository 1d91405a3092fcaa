from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.fake import FakePass
from penstock.tools.bench.serving.static import StaticComparison, StaticSide
from penstock.tools.bench.serving.static_batch import StaticBatch
from tests.fake_passes import next_token

if TYPE_CHECKING:
    from collections.abc import Sequence


def greedy(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompts", [[[5, 6, 7]], [[1, 2, 3, 4, 5, 6, 7, 8], [9], [3, 3, 3]], [[2] * 16, [7] * 17]])
def test_static_batch_computes_the_same_tokens_as_single_requests(prompts: Sequence[list[int]]) -> None:
    forward_pass = FakePass.load(None, PassOptions(max_running=len(prompts)))
    forward_pass.create_cache(8 * len(prompts), 4, "fp32")
    steps: list[list[int]] = []
    StaticBatch(forward_pass, 4, 8).run([np.array(prompt, np.int32) for prompt in prompts], 6, steps.append)
    vocab_size = forward_pass.spec.vocab_size
    assert [list(row) for row in zip(*steps, strict=True)] == [greedy(prompt, 6, vocab_size) for prompt in prompts]


def test_comparison_is_the_median_ratio_of_its_rounds() -> None:
    continuous = [StaticSide(90, 100), StaticSide(99, 110), StaticSide(120, 105)]
    found = StaticComparison(8, continuous, [StaticSide(90, 80), StaticSide(90, 100), StaticSide(120, 100)])
    assert found.streamed_ratio == pytest.approx(1.0)
    assert found.whole_ratio == pytest.approx(1.1)
    assert [aim.reached for aim in found.aims()] == [True, True]
