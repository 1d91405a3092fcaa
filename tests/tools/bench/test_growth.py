"""How decode steps and evictions grow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.tools.bench.components import growth
from penstock.tools.bench.components.growth import StepPoint

if TYPE_CHECKING:
    from tests.tools.bench.conftest import BenchCommand

SIZES = ("--contexts", "20,70", "--rows", "1,3", "--vocab-sizes", "600,900", "--pages", "40,90", "--steps", "2")
TINY = replace(growth.MODEL, hidden_size=64, layers=1, heads=2, kv_heads=1, intermediate_size=64, vocab_size=700)


@pytest.mark.parametrize("options", [("--gpu", "none"), ("--forward-pass", "fake", "--temperature", "0.7")])
def test_growth_measures_a_step_for_each_size_and_evictions_for_each_number_of_pages(
    options: tuple[str, ...], bench: BenchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MODEL", TINY)
    run = bench("growth", *SIZES, *options)
    assert run.status == 0, run.errors
    sections = run.report["sections"]
    evictions = sections.pop("evictions")
    shapes = {
        name: [(point["context_tokens"], point["rows"], point["vocab_size"]) for point in points]
        for name, points in sections.items()
    }
    assert shapes == {
        "contexts": [(20, 1, 700), (70, 1, 700)],
        "rows": [(256, 1, 700), (256, 3, 700)],
        "vocabularies": [(256, rows, vocab_size) for vocab_size in (600, 900) for rows in (1, 16)],
    }
    assert all(point["step_ms"] > 0 for points in sections.values() for point in points)
    assert [(point["tenants"], point["pages"]) for point in evictions] == [
        (tenants, pages) for tenants in (1, 2, 16) for pages in (40, 90)
    ]
    assert all(point["page_us"] > 0 for point in evictions)


def test_throughput_counts_every_row() -> None:
    assert StepPoint(100, rows=4, vocab_size=10, step_ms=8.0).tokens_per_s == 500.0
