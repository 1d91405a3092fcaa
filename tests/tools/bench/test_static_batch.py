from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backend.forward_pass import PassOptions, StepBatch, StepOutput, TokenMasks
from penstock.backend.passes.fake import FakePass, next_token
from penstock.tools.bench.serving.static import StaticComparison, StaticRound
from penstock.tools.bench.serving.static_batch import StaticBatch, StaticJob, StaticTiming

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RecordingPass(FakePass):
    """Records the tokens of each slot."""

    streams: dict[int, list[int]]

    def sample(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        output = super().sample(logits, batch, masks)
        for slot, token in zip(batch.slots.tolist(), output.token_ids.tolist(), strict=True):
            self.streams.setdefault(slot, []).append(token)
        return output


def greedy(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompts", [[[5, 6, 7]], [[1, 2, 3, 4, 5, 6, 7, 8], [9], [3, 3, 3]], [[2] * 16, [7] * 17]])
def test_static_batch_computes_the_same_tokens_as_single_requests(prompts: list[list[int]]) -> None:
    forward_pass = RecordingPass.load(None, PassOptions(max_running=len(prompts)))
    assert isinstance(forward_pass, RecordingPass)
    forward_pass.streams = {}
    forward_pass.create_cache(8 * len(prompts), 4, "fp32")
    timing = StaticBatch(forward_pass, 4, 8).run(StaticJob(prompts, [6] * len(prompts)))
    vocab_size = forward_pass.spec.vocab_size
    assert sorted(forward_pass.streams.values()) == sorted(greedy(prompt, 6, vocab_size) for prompt in prompts)
    assert 0 < timing.prefill_s < timing.total_s


def test_static_batch_lasts_until_its_longest_answer_ends() -> None:
    forward_pass = RecordingPass.load(None, PassOptions(max_running=2))
    assert isinstance(forward_pass, RecordingPass)
    forward_pass.streams = {}
    forward_pass.create_cache(16, 4, "fp32")
    StaticBatch(forward_pass, 4, 8).run(StaticJob([[1, 2], [3, 4]], [2, 7]))
    assert {slot: len(tokens) for slot, tokens in forward_pass.streams.items()} == {0: 7, 1: 7}


def test_timing_survives_encoding() -> None:
    timing = StaticTiming(0.25, 1.5)
    assert msgspec.json.decode(msgspec.json.encode(timing), type=StaticTiming) == timing


def test_comparison_is_the_median_ratio_of_its_rounds() -> None:
    rounds = [
        StaticRound(90, 100, 100, 90, 80, 0.1, 1.0, 0.5),
        StaticRound(99, 110, 100, 90, 100, 0.1, 0.8, 0.6),
        StaticRound(120, 105, 100, 120, 100, 0.1, 0.6, 0.7),
    ]
    comparison = StaticComparison.of(rounds, 8, 0.1)
    assert comparison.throughput_ratio == pytest.approx(0.99)
    assert comparison.ttft_ratio == pytest.approx(8.0)
    assert comparison.ttft_streaming_ratio == pytest.approx(6.0)
    assert comparison.whole_throughput_ratio == pytest.approx(1.05)
    assert comparison.http_throughput_ratio == pytest.approx(1.0)
    assert comparison.http_whole_throughput_ratio == pytest.approx(1.1)
    assert [aim.reached for aim in comparison.aims()] == [True, True, True, True, True]
