"""Measurements of one part, without a server."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.tools.bench.components import channel_sweep, ipc, mask_cost, scheduling
from tests.tools.bench.conftest import FAKE, BenchCommand


def test_channel_sweep_gives_each_variant_the_same_load(bench: BenchCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [channel_sweep.Variant(0), channel_sweep.DEFAULT, channel_sweep.Variant(1, is_late=False)]
    monkeypatch.setattr(channel_sweep, "VARIANTS", variants)
    lengths = ["--prompt-tokens", "5", "--output-tokens", "9"]
    run = bench("channel-sweep", "--concurrency", "4", "--requests", "12", "--rounds", "1", *lengths)
    assert run.status == 0, run.errors
    sweep = run.report["sections"]["channel_sweep"]
    assert [row["name"] for row in sweep["rows"]] == ["0", "1", "1, at once"]
    for (entry,) in sweep["rounds"].values():
        assert entry["steady"]["output_tokens"] == 12 * 9
        assert entry["spike"]["output_tokens"] == 12 * 9 + 10 * 16
        assert entry["drops"]["output_tokens"] < 12 * 9
    assert "Capacity 0 against 1" in run.output


def test_scheduling_is_measured_with_and_without_a_queue(bench: BenchCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "measure_scheduling", partial(scheduling.measure_scheduling, 8, 20, 50))
    run = bench("scheduling")
    assert run.status == 0, run.errors
    found = run.report["sections"]["scheduling"]
    for name, waiting in (("alone", 0), ("with_queue", 20)):
        turn = found[name]
        assert (turn["running"], turn["waiting"], turn["turns"]) == (8, waiting, 50)
        assert 0 < turn["p50_ms"] <= turn["p99_ms"] <= turn["worst_ms"]
    assert [aim["limit"] for aim in run.report["aims"]] == [0.25, 1.0, 0.1]
    assert "scheduling pass of 8 sequences" in run.output


def test_ipc_reports_the_cost_of_both_sides(bench: BenchCommand) -> None:
    run = bench("ipc", "--concurrency", "3")
    assert run.status == 0, run.errors
    (cost,) = run.report["sections"]["ipc"]
    assert (cost["streams"], cost["events"]) == (3, 3 * ipc.NUM_STEPS)
    assert 1 <= cost["events_per_message"] <= 3
    assert cost["backend_cpu_us_per_event"] > 0
    assert cost["client_cpu_us_per_event"] > 0
    assert "frontend CPU" in run.output


def test_mask_cost_is_measured_over_the_model_vocabulary_and_a_large_one(
    bench: BenchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LARGE_VOCAB_SIZE", 6000), ("NUM_ROWS", 2), ("NUM_SAMPLINGS", 2)):
        monkeypatch.setattr(mask_cost, name, value)
    run = bench("mask-cost", *FAKE)
    assert run.status == 0, run.errors
    found = run.report["sections"]["mask_cost"]
    kinds = ["json_schema", "regex", "lark"]
    assert [(cost["vocab_size"], cost["grammar"]) for cost in found] == [
        (vocab_size, kind) for vocab_size in (4096, 6000) for kind in kinds
    ]
    for cost in found:
        assert cost["rows"] > 0
        for kind in ("first", "cold", "warm", "warm_advance"):
            assert 0 < cost[kind]["p50_us"] <= cost[kind]["p99_us"]
    assert [aim["limit"] for aim in run.report["aims"]] == [100.0] * 4
    assert "warm advance" in run.output
