"""Predictions follow from limits, machine code and gaps; the report marks those that miss."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.tools.gpu_check.machine_code.kernel_rows import read_table
from penstock.tools.gpu_check.prediction.kernels import KernelTimes, kernel_times
from penstock.tools.gpu_check.prediction.machine import H200
from penstock.tools.gpu_check.prediction.models import LLAMA_8B, ModelTimes
from penstock.tools.gpu_check.prediction.predictions import PAGE, make_predictions, predicted_values, table_lines
from penstock.tools.gpu_check.reporting.goals import GOALS
from penstock.tools.gpu_check.reporting.report import is_missed, write_report
from penstock.tools.gpu_check.reporting.results import Finding, SectionOutcome


def test_the_command_itself_does_not_import_torch() -> None:
    """That takes seconds of each lease; the sections do it in processes of their own."""
    code = "import sys, penstock.tools.gpu_check.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_every_goal_has_a_prediction_that_the_hardware_allows() -> None:
    predictions = make_predictions()
    for goal in GOALS:
        predicted = predictions[goal.finding]
        assert predicted.unit == goal.unit
        limit = float(goal.limit.replace(",", "") or 0)
        if limit:
            assert predicted.value <= limit * 1.005 if goal.at_least else predicted.value >= limit, goal.finding


def test_page_shows_what_the_code_predicts() -> None:
    """Small changes of kernels need no new page. After a larger one: prediction.predictions --save."""
    shown, now = (rows(text) for text in (PAGE.read_text(encoding="utf-8"), "\n".join(table_lines(make_predictions()))))
    assert [row[:4] for row in shown] == [row[:4] for row in now]
    for row, (*_, value) in zip(shown, now, strict=True):
        assert number(row[4]) == pytest.approx(number(value), rel=0.1), row[0]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]


def number(cell: str) -> float:
    return float(cell.partition(" ")[0].replace(",", ""))


def test_more_instructions_make_a_kernel_slower_only_where_they_are_the_limit() -> None:
    rows = read_table()
    doubled = {name: replace(row, tile_instructions=2 * row.tile_instructions) for name, row in rows.items()}
    before, after = KernelTimes(H200, rows), KernelTimes(H200, doubled)
    heads = LLAMA_8B.heads
    streamed = [times.decode_attention(heads, 64, 1024, "bf16") for times in (before, after)]
    issued = [times.prefill_attention(heads, 0, 4096, "bf16", wgmma=False) for times in (before, after)]
    multiplied = [times.prefill_attention(heads, 0, 4096, "bf16") for times in (before, after)]
    assert 1.0 < streamed[1] / streamed[0] < 1.35
    assert issued[1] / issued[0] > 1.7
    assert multiplied[1] / multiplied[0] < 1.35
    assert after.product(64, 4096, 4096) == before.product(64, 4096, 4096)


def test_short_chunk_leaves_the_gpu_idle_unless_its_history_has_several_segments() -> None:
    times = kernel_times(H200)

    def per_token(history: int, num_tokens: int) -> float:
        return times.prefill_attention(LLAMA_8B.heads, history, num_tokens, "bf16") / num_tokens

    assert per_token(30_000, 100) == pytest.approx(per_token(30_000, 2048), rel=0.1)
    assert per_token(1900, 100) > 3 * per_token(1900, 2048)


def test_gaps_and_bandwidth_count_as_often_as_there_are_kernels_and_bytes() -> None:
    model = ModelTimes(kernel_times(H200), LLAMA_8B)
    no_gaps = ModelTimes(kernel_times(replace(H200, node_gap_us=0.0, dependent_gap_us=0.0)), LLAMA_8B)
    # 6 around the layers, one of them of the sampler; in each layer nine, or five that begin early.
    assert model.decode_step(64, 1024) - no_gaps.decode_step(64, 1024) == pytest.approx((6 + 32 * 9) * 1.3)
    assert model.decode_step(1, 1024) - no_gaps.decode_step(1, 1024) == pytest.approx(6 * 1.3 + 32 * 5 * 0.6)
    slower = ModelTimes(kernel_times(replace(H200, bandwidth=H200.bandwidth / 2)), LLAMA_8B)
    # 15.0 GB of weights and 0.13 GB of keys and values.
    added_us = slower.decode_step(1, 1024) - model.decode_step(1, 1024)
    assert added_us == pytest.approx(15.01e9 / 4.3e12 / 0.9 * 1e6, rel=0.05)
    assert model.prefill(2048) > 2 * model.prefill(1024) * 0.95


def test_report_marks_predictions_that_miss(tmp_path: Path) -> None:
    findings = [Finding("llama8b.decode.1x1k", 200.0, "tok/s"), Finding("attention.decode.1x1k", 30.0, "us")]
    predicted = {"llama8b.decode.1x1k": 198.0, "attention.decode.1x1k": 7.0, "engine.gpu_idle": 1.0}
    write_report(tmp_path, [SectionOutcome("kernels", "done", 1.0, findings)], {}, predicted=predicted)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["finding"], row["missed"]) for row in report["predictions"]] == [
        ("llama8b.decode.1x1k", False), ("attention.decode.1x1k", True),
    ]  # fmt: skip
    page = (tmp_path / "report.md").read_text()
    assert "## Missed by over 20 %: 1 of 2 predictions" in page
    assert "| attention.decode.1x1k | 7 | 30 | 4.29 |" in page
    assert "| Llama-8B decode, batch 1, context 1k | tok/s | 284 | ≥ 225 | 198 | 200 | fail |" in page


@pytest.mark.parametrize(("measured", "missed"), [(81, False), (119, False), (79, True), (121, True)])
def test_miss_is_over_a_fifth_on_either_side(measured: float, missed: bool) -> None:
    assert is_missed(100, measured) is missed


def test_values_are_those_of_the_predictions() -> None:
    assert predicted_values("NVIDIA H200") == {name: each.value for name, each in make_predictions().items()}
    of_h100 = predicted_values("NVIDIA H100 80GB HBM3")
    assert of_h100["llama8b.decode.1x1k"] < 0.8 * predicted_values("NVIDIA H200")["llama8b.decode.1x1k"]
    assert predicted_values("NVIDIA L40S") == {}
