"""Measurements of one part, without a server."""

from __future__ import annotations

import pytest

from penstock.tools.bench.components import mask_cost
from tests.tools.bench.conftest import FAKE, BenchCommand


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
