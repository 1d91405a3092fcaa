"""`penstock bench` as it is typed, on servers over the fake pass."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shm.process.supervisor import module_argv
from penstock.tools.bench.components import channel_sweep, ipc, mask_cost, scheduling
from penstock.tools.bench.harness import run as context
from penstock.tools.bench.harness.processes import descendants, process_use, runs_module
from penstock.tools.bench.harness.report import BenchReport, check_can_write
from penstock.tools.bench.harness.run import Bench
from penstock.tools.bench.harness.server import BenchServer, bench_server
from penstock.tools.bench.serving import workers_scaling
from penstock.tools.bench.serving.workers_scaling import WorkerLoad
from penstock.tools.main import app
from penstock.tools.serve import ServeOptions


@dataclass(frozen=True)
class Run:
    status: int
    output: str
    errors: str
    report: dict[str, Any]


Command = Callable[..., Run]
Servers = Callable[[ServeOptions], AbstractContextManager[BenchServer]]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """The benchmark's own servers, but tests that ask for the same options get the same one."""
    started: dict[ServeOptions, BenchServer] = {}
    with ExitStack() as stack:

        @contextmanager
        def server(options: ServeOptions) -> Iterator[BenchServer]:
            if options not in started:
                started[options] = stack.enter_context(bench_server(options))
            yield started[options]

        yield server


@pytest.fixture
def bench(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """The command in this process."""
    monkeypatch.setattr(context, "bench_server", servers)

    def bench(*arguments: str) -> Run:
        path = tmp_path / "report.json"
        with pytest.raises(SystemExit) as exited:
            app(["bench", "--forward-pass", "fake", "--json", str(path), *arguments])
        assert isinstance(exited.value.code, int)
        captured = capsys.readouterr()
        report = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        return Run(exited.value.code, captured.out, captured.err, report)

    return bench


def test_a_row_for_each_concurrency_with_the_machine_beside_it(bench: Command) -> None:
    arguments = ["--concurrency", "1,3", "--prompt-tokens", "4:9", "--output-tokens", "5", "--duplicates", "0.5"]
    run = bench(*arguments)
    assert run.status == 0, run.errors
    assert [(row["load"], row["requests"], row["completed"]) for row in run.report["rows"]] == [
        ("c=1", 4, 4),
        ("c=3", 12, 12),
    ]
    assert [row["output_tokens"] for row in run.report["rows"]] == [20, 60]
    assert run.report["machine"]["cpu"]
    assert "c=3" in run.output


def test_a_storm_leaves_nothing_behind(bench: Command) -> None:
    arguments = ["--storm", "--requests", "60", "--concurrency", "16", "--endpoint", "chat", "--output-tokens", "24"]
    run = bench(*arguments)
    assert run.status == 0, run.output + run.errors
    (row,) = run.report["rows"]
    assert (row["completed"], row["dropped"], row["failed"]) == (30, 30, 0)
    aftermath = run.report["sections"]["aftermath"]
    assert (aftermath["running"], aftermath["waiting"], aftermath["pages_used"]) == (0, 0, 0)


def test_a_storm_in_which_nobody_hangs_up_is_one(bench: Command) -> None:
    run = bench("--storm", "--drop", "0", "--requests", "6", "--concurrency", "3", "--output-tokens", "4")
    assert run.status == 0, run.output + run.errors
    (row,) = run.report["rows"]
    assert (row["completed"], row["dropped"]) == (6, 0)


def test_continuous_and_static_run_the_same_requests(bench: Command) -> None:
    arguments = ["--compare", "static", "--stagger-s", "0.001", "--prompt-tokens", "3:9", "--output-tokens", "4:6"]
    run = bench(*arguments)
    assert run.status == 0, run.errors
    comparison = run.report["sections"]["compare_static"]
    assert comparison["requests"] == 8
    assert len(comparison["rounds"]) == 3
    assert [aim["limit"] for aim in run.report["aims"]] == [1.0, 0.95, 4.0]


def test_the_cost_of_a_token_is_told_for_each_process(bench: Command) -> None:
    run = bench("--frontend-cost", "--requests", "64")
    assert run.status == 0, run.errors
    cost = run.report["sections"]["frontend_cost"]
    assert cost["output_tokens"] == run.report["rows"][0]["output_tokens"] > 0
    assert cost["frontend_cpu_us_per_token"] > 0
    assert cost["backend_cpu_us_per_token"] > 0


def test_identical_streams_are_computed_once_while_they_run_together(bench: Command) -> None:
    run = bench("--coalescing", "--prompt-tokens", "9", "--output-tokens", "6")
    assert run.status == 0, run.errors
    found = run.report["sections"]["coalescing"]
    for side in found["alone"]:
        assert (side["output_tokens"], side["generated_tokens"], side["computed_tokens"]) == (6, 6, 9 + 5)
    for side in found["identical"]:
        # One that comes when the others have ended is computed again.
        num_computed = 8 - side["requests_coalesced"]
        assert (side["output_tokens"], side["generated_tokens"]) == (8 * 6, num_computed * 6)
    assert "8 identical" in run.output


def test_a_shared_prefix_is_computed_once_though_it_ends_within_a_page(bench: Command) -> None:
    lengths = ["--prefix-tokens", "70", "--suffix-tokens", "3", "--output-tokens", "2", "--page-size", "32"]
    # A seed of its own: the server has kept pages of what other tests drew.
    run = bench("--shared-prefix", "--requests", "5", "--seed", "7", *lengths)
    assert run.status == 0, run.errors
    found = run.report["sections"]["shared_prefix"]
    assert found["distinct_tokens"] == 70 + 5 * 3
    for entry in found["rounds"]:
        assert (entry["prefill_tokens"], entry["cached_tokens"]) == (found["distinct_tokens"], 4 * 70)


def test_gaps_of_running_streams_are_measured_while_prompts_arrive(bench: Command) -> None:
    sizes = ["--prompt-tokens", "4", "--long-prompt-tokens", "100", "--max-batch-tokens", "20", "--max-running", "20"]
    run = bench("--interference", *sizes)
    assert run.status == 0, run.errors
    found = run.report["sections"]["interference"]
    assert (found["long_prompt_tokens"], found["step_tokens"], len(found["rounds"])) == (100, 20, 3)
    for entry in found["rounds"]:
        assert 0 <= entry["itl_p50_ms"] <= entry["itl_p99_ms"] <= entry["itl_max_ms"]
        assert entry["full_step_ms"] > 0


def test_a_sweep_sends_each_capacity_the_same_load(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [channel_sweep.Variant(0), channel_sweep.DEFAULT, channel_sweep.Variant(1, is_late=False)]
    monkeypatch.setattr(channel_sweep, "VARIANTS", variants)
    monkeypatch.setattr(Bench, "num_rounds", 1)
    lengths = ["--prompt-tokens", "5", "--output-tokens", "9"]
    run = bench("--channel-sweep", "--concurrency", "4", "--requests", "12", *lengths)
    assert run.status == 0, run.errors
    sweep = run.report["sections"]["channel_sweep"]
    assert [row["name"] for row in sweep["rows"]] == ["0", "1", "1, at once"]
    for (entry,) in sweep["rounds"].values():
        assert entry["steady"]["output_tokens"] == 12 * 9
        assert entry["spike"]["output_tokens"] == 12 * 9 + 10 * 16
        assert entry["drops"]["output_tokens"] < 12 * 9
    assert "Capacity 0 against 1" in run.output


def test_a_turn_of_the_loop_is_measured_with_and_without_a_queue(
    bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "measure_scheduling", partial(scheduling.measure_scheduling, 8, 20, 50))
    run = bench("--scheduling")
    assert run.status == 0, run.errors
    found = run.report["sections"]["scheduling"]
    for name, waiting in (("alone", 0), ("crowded", 20)):
        turn = found[name]
        assert (turn["running"], turn["waiting"], turn["turns"]) == (8, waiting, 50)
        assert 0 < turn["p50_ms"] <= turn["p99_ms"] <= turn["worst_ms"]
    assert [aim["limit"] for aim in run.report["aims"]] == [0.25, 1.0, 0.1]
    assert "scheduling pass of 8 sequences" in run.output


def test_the_link_alone_costs_both_sides_something(bench: Command) -> None:
    run = bench("--ipc", "--concurrency", "3")
    assert run.status == 0, run.errors
    (cost,) = run.report["sections"]["ipc"]
    assert (cost["streams"], cost["events"]) == (3, 3 * ipc.NUM_STEPS)
    assert 1 <= cost["events_per_message"] <= 3
    assert cost["backend_cpu_us_per_event"] > 0
    assert cost["client_cpu_us_per_event"] > 0
    assert "frontend CPU" in run.output


def test_masks_are_measured_over_the_models_vocabulary_and_a_large_one(
    bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LARGE_VOCAB_SIZE", 6000), ("NUM_ROWS", 2), ("NUM_SAMPLINGS", 2)):
        monkeypatch.setattr(mask_cost, name, value)
    run = bench("--mask-cost")
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
    assert "of it advance" in run.output


def test_one_worker_and_two_serve_the_same_load(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = (WorkerLoad("streams", "completions", 3, 7, 1), WorkerLoad("answers", "chat", 4, 1, 1))
    monkeypatch.setattr(workers_scaling, "LOADS", loads)
    monkeypatch.setattr(Bench, "num_rounds", 1)
    run = bench("--workers-scaling", "--requests", "6")
    assert run.status == 0, run.errors
    found = run.report["sections"]["workers_scaling"]
    assert [scaling["load"] for scaling in found] == ["streams", "answers"]
    for load, scaling in zip(loads, found, strict=True):
        (one,), (two,) = scaling["one"], scaling["two"]
        assert (one["workers"], two["workers"]) == (1, 2)
        assert one["output_tokens"] == two["output_tokens"] == 6 * load.output_tokens
        assert len(two["worker_cpu_s"]) == len(one["worker_cpu_s"]) + 1
        ratio = (two["output_tokens"] / two["duration_s"]) / (one["output_tokens"] / one["duration_s"])
        assert scaling["tokens_per_s_ratio"] == pytest.approx(ratio)
    has_cores = run.report["machine"]["cores"] >= workers_scaling.MIN_CORES
    assert len(run.report["aims"]) == (2 if has_cores else 0)
    assert ("not measurable here" in run.output) is not has_cores


def test_a_load_that_the_server_refuses_ends_the_measurement_of_workers(
    bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_scaling, "LOADS", (WorkerLoad("too long", "completions", 3, 1 << 20, 1),))
    run = bench("--workers-scaling", "--requests", "2")
    assert run.status == 1
    assert "a request failed: status 400" in run.errors


def test_a_benchmark_that_is_killed_leaves_no_server() -> None:
    with tempfile.TemporaryDirectory() as directory:  # a short one, for there will be a socket in it
        _check_killed_benchmark(Path(directory))


def _check_killed_benchmark(tmp_path: Path) -> None:
    argv = module_argv("penstock.tools.main", ["bench", "--forward-pass", "fake", "--requests", "1000000"])
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)})
    while not (servers := [pid for pid in descendants(process.pid) if runs_module(pid, "penstock.backend.main")]):
        assert process.poll() is None
    server = os.pidfd_open(servers[0])
    process.kill()
    process.wait()
    assert select.select([server], [], [], 60)[0]
    os.close(server)


def test_a_server_that_does_not_start_is_one_line_and_its_own_words(bench: Command, tmp_path: Path) -> None:
    run = bench("--model", str(tmp_path / "nowhere"))
    assert run.status == 1
    assert "nowhere" in run.errors
    assert "Traceback" not in run.errors
    assert not run.report


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "nonsense"], "address"),
        (["--url", "http://127.0.0.1:1"], "no connection"),
        (["--url", "http://127.0.0.1:1", "--coalescing"], "leave --url out"),
        (["--interference", "--max-running", "8"], "--max-running is 8"),
        (["--scheduling", "--url", "http://127.0.0.1:1"], "leave --url out"),
        (["--channel-sweep", "--url", "http://127.0.0.1:1"], "leave --url out"),
        (["--mask-cost", "--url", "http://127.0.0.1:1"], "leave --url out"),
        (["--workers-scaling", "--url", "http://127.0.0.1:1"], "leave --url out"),
        (["--storm", "--floor"], "choose one"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(bench: Command, arguments: list[str], reason: str) -> None:
    run = bench(*arguments)
    assert run.status == 1
    (line,) = run.errors.strip().splitlines()
    assert reason in line


@pytest.mark.parametrize(("name", "reason"), [("missing/x.json", "No such file or directory"), (".", "Is a directory")])
def test_a_report_that_cannot_be_written_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    monkeypatch.setattr(scheduling, "measure_scheduling", partial(pytest.fail, "it was measured"))
    path = tmp_path / name
    with pytest.raises(SystemExit) as exited:
        app(["bench", "--scheduling", "--json", str(path)])
    assert exited.value.code == 1
    assert capsys.readouterr().err == f"penstock bench: --json {path} cannot be written: {reason}\n"


def test_the_place_of_a_report_is_asked_for_and_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    for path in (new, old):
        check_can_write(path)
    assert not new.exists()
    assert old.read_text() == "kept"


def test_help_shows_sizes_and_counts_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["bench", "--help"])
    shown = capsys.readouterr().out
    for text in ("--kv-budget SIZE|auto", "--max-body SIZE", "--concurrency COUNTS", "1,4,16,32]", "2.10 MB]"):
        assert text in shown
    for text in ("--empty-", f"serve-{os.getpid()}", "[default: ()]"):
        assert text not in shown


def test_a_report_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    BenchReport(["penstock", "bench"]).write_json(path)
    assert msgspec.json.decode(path.read_bytes())["command"] == ["penstock", "bench"]


def test_a_process_is_found_with_what_it_uses() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        assert child.pid in descendants(os.getpid())
        assert process_use(child.pid).rss_bytes > 0
        assert process_use(os.getpid()).cpu_s > 0
        assert not runs_module(child.pid, "penstock.backend.main")
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        process_use(child.pid)
