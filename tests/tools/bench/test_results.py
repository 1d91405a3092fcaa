"""Results that the measurements compute from their observations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.stats import ObservedRequest
from penstock.tools.bench.load_generator.workload import Lengths, Workload
from penstock.tools.bench.serving.bursts import Burst, BurstResult, BurstSide
from penstock.tools.bench.serving.interference import InterferenceResult, InterferenceRound, gaps_s


def test_gaps_of_a_span_are_those_that_overlap_it() -> None:
    record = ObservedRequest(0.0, [1.0, 2.0, 4.0, 4.5, 7.0, 7.25])
    assert gaps_s(record, 3.0, 5.0) == [2.0, 0.5, 2.5]
    assert gaps_s(record, 2.0, 4.0) == [2.0]


def test_interference_is_the_median_ratio_of_the_rounds() -> None:
    rounds = [
        InterferenceRound(1.0, full, 5.0, p99, p99, 9.0) for full, p99 in ((10.0, 30.0), (10.0, 11.0), (8.0, 12.0))
    ]
    aim = InterferenceResult(8, 2048, 512, rounds).aim()
    assert aim.value == pytest.approx(1.5)
    assert aim.reached


def test_coalescing_compares_eight_streams_with_one_in_each_round() -> None:
    alone = [BurstSide(wall_s, 0.1, 0.1, 64, 64, 191, 128, 128, 0, 0) for wall_s in (1.0, 2.0, 4.0)]
    identical = [BurstSide(wall_s, 0.1, 0.1, 512, 64, 191, 128, 128, 0, 7) for wall_s in (1.5, 2.0, 4.4)]
    found = BurstResult("identical", 8, alone, identical)
    assert found.wall_ratio == pytest.approx(1.1)
    assert found.computed_ratio == 1.0
    assert [aim.reached for aim in found.aims()] == [False, True]


def test_distinct_tokens_count_the_prefix_once_and_every_suffix() -> None:
    burst = Burst(Workload(Lengths(32, 32), Lengths(4, 4), vocab_size=4096), prefix_tokens=1000)
    assert burst.distinct_tokens(burst.draw(64, seed=1)) == 1000 + 64 * 32
    assert Burst(burst.workload).distinct_tokens(Burst(burst.workload).draw(64, seed=1)) == 32


def test_prompts_with_one_prefix_share_the_prefix_only() -> None:
    burst = Burst(Workload(Lengths(12, 12), Lengths(4, 4), vocab_size=4096), prefix_tokens=20)
    requests, others = burst.draw(6, seed=1), burst.draw(6, seed=2)
    prompts = [request.prompt for request in requests]
    assert {len(prompt) for prompt in prompts} == {32}
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:] for prompt in prompts}) == 6
    assert prompts[0][:20] != others[0].prompt[:20]
    with pytest.raises(BenchError, match="token ids"):
        Burst(replace(burst.workload, vocab_size=None), 20).draw(6, seed=1)
