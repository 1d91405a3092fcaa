"""Measurements over HTTP, on servers over the fake pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.tools.bench.load_generator.sending import measure
from penstock.tools.bench.serving import compare
from penstock.tools.bench.serving.compare import Contender
from penstock.tools.processes import state_of, tree
from tests.system.completions import PACED
from tests.system.processes import wait_until
from tests.tools.bench.conftest import FAKE, BenchCommand, fake_peer

if TYPE_CHECKING:
    from penstock.tools.bench.load_generator.stats import LoadSummary
    from penstock.tools.bench.load_generator.target import Target


def test_load_reports_a_row_for_each_concurrency_and_the_machine(bench: BenchCommand) -> None:
    lengths = ["--prompt-tokens", "4:9", "--output-tokens", "5"]
    run = bench("load", *FAKE, "--concurrency", "1,3", "--duplicates", "0.5", *lengths)
    assert run.status == 0, run.errors
    assert [(row["load"], row["requests"], row["completed"]) for row in run.report["rows"]] == [
        ("c=1", 4, 4),
        ("c=3", 12, 12),
    ]
    assert [row["output_tokens"] for row in run.report["rows"]] == [20, 60]
    assert run.report["machine"]["cpu"]
    assert "c=3" in run.output


def test_compare_lets_only_the_measured_server_run(bench: BenchCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders: list[Contender] = []
    measured: list[str] = []

    def remember(*parts: Any) -> Contender:
        contenders.append(Contender(*parts))
        return contenders[-1]

    async def measure_and_look(target: Target, *arguments: Any) -> LoadSummary:
        measured.append(target.model if target.model in ("one", "two") else compare.PENSTOCK)
        for contender in contenders:
            wait_until(partial(runs if contender.name == measured[-1] else is_paused, contender), 10.0)
        return await measure(target, *arguments)

    with monkeypatch.context() as patches:
        patches.setattr(compare, "Contender", remember)
        patches.setattr(compare, "measure", measure_and_look)
        peers = ["--peer", fake_peer("one"), "--peer", fake_peer("two")]
        size = ["--concurrency", "2", "--rounds", "2", "--requests", "4", "--output-tokens", "5", "--warmup", "1"]
        run = bench("compare", *FAKE, *peers, *size, "--foreign-cores", "1000")
    assert run.status == 0, run.output + run.errors
    assert measured == ["penstock", "one", "two", "one", "two", "penstock"]
    rows = run.report["sections"]["compare"]["rows"]
    assert [row["server"] for row in rows] == ["penstock", "one", "two"]
    for row in rows:
        summaries = [item["summary"] for item in row["rounds"]]
        assert [(item["completed"], item["output_tokens"]) for item in summaries] == [(4, 20)] * 2
        # The fake peers close their connections after each answer.
        assert all((item["sent_again"] > 0) is (row["server"] != "penstock") for item in summaries)
    assert runs(contenders[0])


def runs(contender: Contender) -> bool:
    return "T" not in states(contender)


def is_paused(contender: Contender) -> bool:
    return set(states(contender)) == {"T"}


def states(contender: Contender) -> list[str]:
    """The states of all processes of a server: "T" is stopped."""
    return [state_of(pid) for pid in tree(contender.process.pid)]


def test_storm_leaves_nothing_behind(bench: BenchCommand) -> None:
    size = ["--requests", "60", "--concurrency", "16", "--output-tokens", "24"]
    run = bench("load", "--shape", "storm", *FAKE, "--endpoint", "chat", *size)
    assert run.status == 0, run.output + run.errors
    (row,) = run.report["rows"]
    assert (row["completed"], row["dropped"], row["failed"]) == (30, 30, 0)
    aftermath = run.report["sections"]["aftermath"]
    assert (aftermath["running"], aftermath["waiting"], aftermath["pages_used"]) == (0, 0, 0)


def test_storm_without_drops_completes_every_request(bench: BenchCommand) -> None:
    size = ["--requests", "6", "--concurrency", "3", "--output-tokens", "4"]
    run = bench("load", "--shape", "storm", *FAKE, "--drop", "0", *size)
    assert run.status == 0, run.output + run.errors
    (row,) = run.report["rows"]
    assert (row["completed"], row["dropped"]) == (6, 0)


def test_frontend_cost_is_reported_for_each_process(bench: BenchCommand) -> None:
    run = bench("frontend-cost", "--requests", "8", "--rounds", "1", "--paced")
    assert run.status == 0, run.errors
    cost = run.report["sections"]["frontend_cost"]
    assert cost["output_tokens"] == run.report["rows"][0]["output_tokens"] > 0
    assert cost["frontend_cpu_us_per_token"] > 0
    assert cost["backend_cpu_us_per_token"] > 0
    assert cost["loop_cpu_us_per_step"] > 0


def test_identical_streams_are_computed_once_while_they_overlap(bench: BenchCommand) -> None:
    lengths = ["--prompt-tokens", "9", "--output-tokens", "6"]
    # A seed of its own: no prompt begins with the first token of another test's, whose pages the server still has.
    run = bench("load", "--shape", "identical", *FAKE, "--concurrency", "8", "--seed", "509", *lengths)
    assert run.status == 0, run.errors
    (found,) = run.report["sections"]["identical"]
    for side in found["alone"]:
        assert (side["output_tokens"], side["generated_tokens"], side["computed_tokens"]) == (6, 6, 9 + 5)
    for side in found["burst"]:
        # A request that arrives after the others have ended is computed again.
        num_computed = 8 - side["requests_coalesced"]
        assert (side["output_tokens"], side["generated_tokens"]) == (8 * 6, num_computed * 6)
    assert "8 identical" in run.output


def test_shared_prefix_that_ends_within_a_page_is_computed_once(bench: BenchCommand) -> None:
    lengths = ["--prefix-tokens", "70", "--prompt-tokens", "3", "--output-tokens", "2"]
    # Its own seed: the server still has pages of other tests' prompts.
    run = bench("load", "--shape", "shared-prefix", *FAKE, "--concurrency", "5", "--seed", "700", *lengths)
    assert run.status == 0, run.errors
    (found,) = run.report["sections"]["shared_prefix"]
    for entry in found["burst"]:
        assert entry["distinct_tokens"] == 70 + 5 * 3
        assert (entry["prefill_tokens"], entry["cached_tokens"]) == (entry["distinct_tokens"], 4 * 70)


def test_interference_measures_gaps_while_prompts_arrive(bench: BenchCommand) -> None:
    sizes = ["--prompt-tokens", "4", "--long-prompt-tokens", "100", "--max-batch-tokens", "20", "--max-running", "20"]
    run = bench("interference", *FAKE, *sizes)
    assert run.status == 0, run.errors
    found = run.report["sections"]["interference"]
    assert (found["long_prompt_tokens"], found["step_tokens"], len(found["rounds"])) == (100, 20, 3)
    for entry in found["rounds"]:
        assert 0 <= entry["itl_p50_ms"] <= entry["itl_p99_ms"] <= entry["itl_max_ms"]
        assert entry["full_step_ms"] > 0


def test_server_that_does_not_start_ends_the_run_with_its_reason(bench: BenchCommand, tmp_path: Path) -> None:
    run = bench("load", *FAKE, "--model", str(tmp_path / "nowhere"))
    assert run.status == 1
    assert "nowhere" in run.errors
    assert "Traceback" not in run.errors
    assert not run.report


def test_fairness_reports_both_tenants_alone_and_together(bench: BenchCommand) -> None:
    size = ["--flood-requests", "30", "--flood-output-tokens", "40", "--short-requests", "3"]
    run = bench("fairness", *FAKE, *size)
    found = run.report["sections"]["fairness"]
    assert found["idle"]["requests"] == 3, run.output + run.errors
    assert 1 <= found["beside"]["requests"] <= 3
    assert found["flood_alone"]["requests"] == found["flood_beside"]["requests"] == 30
    assert len(run.report["aims"]) == 2


def test_failover_compares_texts_and_gaps_with_an_undisturbed_run(bench: BenchCommand) -> None:
    run = bench("failover", *PACED, "--streams", "4", "--output-tokens", "150")
    assert run.status == 0, run.output + run.errors
    found = run.report["sections"]["failover"]
    assert found["streams"] == found["equal_answers"] == 4
    assert 1 <= found["moved"] <= 3
    assert found["gap_of_moved_ms"][1] > 0
