"""Results that the measurements compute from their observations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.tools.bench.components.channel_sweep import (
    RoundsMedian,
    Variant,
    VariantRound,
    VariantSummary,
    against_default,
)
from penstock.tools.bench.components.simulation import SimulationResult
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.stats import ObservedRequest
from penstock.tools.bench.load_generator.workload import Lengths, Workload
from penstock.tools.bench.serving.coalescing import CoalescingResult, CoalescingSide
from penstock.tools.bench.serving.interference import InterferenceResult, InterferenceRound, gaps_s
from penstock.tools.bench.serving.shared_prefix import PrefixLoad
from penstock.tools.bench.serving.workers_scaling import MIN_CORES, Scaling, WorkersRun, scaling_aims


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
    alone = [CoalescingSide(wall_s, 64, 64, 191, 0) for wall_s in (1.0, 2.0, 4.0)]
    identical = [CoalescingSide(wall_s, 512, 64, 191, 7) for wall_s in (1.5, 2.0, 4.4)]
    found = CoalescingResult(8, alone, identical)
    assert found.wall_ratio == pytest.approx(1.1)
    assert found.computed_ratio == 1.0
    assert [aim.reached for aim in found.aims()] == [False, True]


def test_distinct_tokens_count_the_prefix_once_and_every_suffix() -> None:
    load = PrefixLoad(64, prefix_tokens=1000, suffix_tokens=32)
    assert load.distinct_tokens == 1000 + 64 * 32
    assert load.sent_tokens == 64 * 1032


def test_prompts_with_one_prefix_share_the_prefix_only() -> None:
    load = PrefixLoad(6, prefix_tokens=20, suffix_tokens=12)
    workload = Workload(Lengths(1, 1), Lengths(4, 4), vocab_size=4096)
    requests, others = load.draw(workload, seed=1), load.draw(workload, seed=2)
    prompts = [request.prompt for request in requests]
    assert {len(prompt) for prompt in prompts} == {32}
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:] for prompt in prompts}) == 6
    assert prompts[0][:20] != others[0].prompt[:20]
    with pytest.raises(BenchError, match="token ids"):
        load.draw(replace(workload, vocab_size=None), seed=1)


def variant_round(output_tokens: int, wasted: int, first_steps: int) -> VariantRound:
    load = SimulationResult(
        duration_s=2.0,
        steps=100,
        idle_s=0.01,
        output_tokens=output_tokens,
        computed_tokens=1000,
        wasted_tokens=wasted,
        saved_tokens=7,
        ttfts_ms=[4.0, 8.0, 6.0],
        burst_steps=[[first_steps, 30], [first_steps + 2, 40]],
    )
    return VariantRound(load, load, load)


def test_variant_summary_has_medians_and_spread_of_its_rounds() -> None:
    row = VariantSummary.of(
        Variant(2), [variant_round(90, 10, 3), variant_round(100, 40, 1), variant_round(300, 20, 2)]
    )
    assert row.name == "2"
    assert row.output_tokens_per_s == RoundsMedian(50, 45, 150)
    assert row.idle_us.median == pytest.approx(100)
    assert row.tokens_per_step == RoundsMedian(1.0, 0.9, 3.0)
    assert row.ttft_p50_ms == RoundsMedian(6, 6, 6)
    assert row.wasted_tokens == RoundsMedian(20, 10, 40)
    assert row.burst_first_steps == RoundsMedian(3, 2, 4)
    assert row.burst_last_steps == RoundsMedian(35, 35, 35)


def test_median_shows_its_spread_only_if_it_is_visible() -> None:
    assert RoundsMedian(2.0, 1.0, 3.0).show(".1f") == "2.0 (1.0–3.0)"
    assert RoundsMedian(2.0, 1.99, 2.01).show(".1f") == "2.0"


def test_variants_are_compared_with_the_default() -> None:
    rows = [
        VariantSummary.of(Variant(capacity), [variant_round(100 + 50 * capacity, 0, capacity)])
        for capacity in (0, 1, 4)
    ]
    none_ahead, four_ahead = against_default(rows)
    assert none_ahead == (
        "Capacity 0 against 1: 0.667 × the throughput, TTFT p50 +0.0 ms, a burst's first token -1.0 steps."
    )
    assert four_ahead.startswith("Capacity 4 against 1: 2.000 × the throughput")
    assert four_ahead.endswith("+3.0 steps.")


def test_workers_have_an_aim_only_with_enough_cores() -> None:
    def run(workers: int, duration_s: float, cpu_s: float) -> WorkersRun:
        return WorkersRun(workers, duration_s, 1000, 500, [0.0, cpu_s], 1.0, 1.0)

    one = [run(1, 2.0, 2.0), run(1, 2.0, 2.0), run(1, 2.0, 2.0)]
    two = [run(2, 1.0, 4.0), run(2, 1.6, 2.0), run(2, 1.25, 2.5)]
    scaling = Scaling.of("streams", one, two)
    assert (scaling.tokens_per_s_ratio, scaling.tokens_per_cpu_s_ratio) == (1.6, 0.8)
    assert scaling_aims([scaling], MIN_CORES - 1) == []
    (aim,) = scaling_aims([scaling], MIN_CORES)
    assert (aim.value, aim.limit, aim.reached) == (1.6, 1.8, False)
