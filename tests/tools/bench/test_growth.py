"""Decode steps on the bare pass, and how they grow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.backend.passes.decoder.cpu.path_choice import load_kernels
from penstock.tools.bench.components import growth
from penstock.tools.bench.components.growth import PARTS, GrowthPoint

if TYPE_CHECKING:
    from tests.tools.bench.conftest import BenchCommand

SIZES = ("--contexts", "20,70", "--rows", "1,3", "--vocab-sizes", "600,900", "--vocab-rows", "1,2", "--steps", "2")
TINY = replace(growth.MODEL, hidden_size=64, layers=1, heads=2, kv_heads=1, intermediate_size=64, vocab_size=700)


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MODEL", TINY)


def require_kernels() -> None:
    if load_kernels() is None:
        pytest.skip("this machine has no native kernels")


@pytest.mark.usefixtures("tiny_model")
def test_growth_measures_a_step_for_each_size_and_says_where_its_time_goes(bench: BenchCommand) -> None:
    require_kernels()
    run = bench("growth", *SIZES, "--short-context", "30", "--gpu", "none")
    assert run.status == 0, run.errors
    sections = run.report["sections"]
    shapes = {
        name: [(point["context_tokens"], point["rows"], point["vocab_size"]) for point in points]
        for name, points in sections.items()
    }
    assert shapes == {
        "contexts": [(20, 1, 700), (70, 1, 700)],
        "rows": [(30, 1, 700), (30, 3, 700)],
        "vocabularies_1": [(30, 1, 600), (30, 1, 900)],
        "vocabularies_2": [(30, 2, 600), (30, 2, 900)],
    }
    for point in (point for points in sections.values() for point in points):
        assert point["step_ms"] > 0
        assert tuple(point["parts_ms"]) == PARTS
        assert all(point["parts_ms"][part] > 0 for part in PARTS)
    assert "Rows at a context of 30" in run.output


@pytest.mark.usefixtures("tiny_model")
def test_growth_measures_whole_steps_of_any_pass(bench: BenchCommand) -> None:
    run = bench("growth", *SIZES, "--short-context", "30", "--forward-pass", "fake", "--temperature", "0.7")
    assert run.status == 0, run.errors
    for point in run.report["sections"]["rows"]:
        assert point["step_ms"] > 0
        assert point["parts_ms"] == {}


def test_throughput_counts_every_row_and_shares_are_of_all_parts() -> None:
    point = GrowthPoint(100, rows=4, vocab_size=10, step_ms=8.0, parts_ms={"linears": 3.0, "attention": 1.0})
    assert point.tokens_per_s == 500.0
    assert point.share("attention") == 0.25
