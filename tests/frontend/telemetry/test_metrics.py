"""GET /metrics, read by Prometheus' own parser."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.frontend.telemetry import metrics
from penstock.frontend.telemetry.metrics import Source, render
from penstock.process.children import find_program
from penstock.shm.memory.board import RESPONSE_FIELDS, BackendBoard, Board, FrontendBoard, Histogram
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, says

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
NOTHING = dict.fromkeys(FrontendBoard.fields, 0)
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "penstock.json"
ALERTS = Path(__file__).parents[3] / "docs" / "prometheus" / "alerts.yml"
PROMTOOL = find_program("promtool")


def parse(page: bytes) -> Samples:
    """Return every sample. Checks what the parser does not: each family and sample occurs once and is named
    correctly."""
    text = page.decode()
    assert text.endswith("\n")
    samples: Samples = {}
    seen: set[str] = set()
    for family in text_string_to_metric_families(text):
        assert family.name not in seen
        assert family.type in ("gauge", "counter", "histogram")
        assert len(family.documentation) > 5
        seen.add(family.name)
        for sample in family.samples:
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            assert sample.name in {family.name + suffix for suffix in suffixes}
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
    assert len(seen) == text.count("# TYPE ") == text.count("# HELP ")
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"penstock_{name}", frozenset(labels.items())]


@pytest.fixture
def board() -> Iterator[BackendBoard]:
    board = BackendBoard.create()
    yield board
    board.close()


async def test_metrics_are_prometheus_text_and_need_no_key(backend: FakeBackend, board: BackendBoard) -> None:
    backend.backend_counters = board.values()
    connection = ClientConnection(make_app(backend, api_keys=("secret",)))
    assert (await connection.request("GET", "/v1/models")).status == 401
    for _ in range(2):
        response = await connection.request("GET", "/metrics")
        assert response.status == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = parse(response.body)
    assert value(samples, "backend_up") == 1
    worker = str(os.getpid())
    assert value(samples, "worker_http_responses_total", worker=worker, status="200") == 1
    assert value(samples, "worker_http_responses_total", worker=worker, status="401") == 1
    await connection.end()


async def test_worker_metrics_are_reported_without_a_backend(backend: FakeBackend) -> None:
    backend.backend_counters, backend.ready, backend.model = None, False, None
    backend.board.tokens_streamed = 7
    connection = ClientConnection(make_app(backend))
    samples = parse((await connection.request("GET", "/metrics")).body)
    assert value(samples, "backend_up") == 0
    assert value(samples, "worker_tokens_streamed_total", worker=str(os.getpid())) == 7
    assert all(name == "penstock_backend_up" or name.startswith("penstock_worker_") for name, _ in samples)
    await connection.end()


def test_every_counter_of_the_boards_is_reported(board: BackendBoard) -> None:
    for number, name in enumerate(BackendBoard.fields, start=1000):
        setattr(board, name, number)
    board.pages_used, board.pages_idle, board.pages_total = 11, 22, 100
    worker = {name: number for number, name in enumerate(FrontendBoard.fields, start=2000)}
    samples = parse(render(1, [Source("m", worker, board.values())]))
    reported = set(samples.values())
    in_histograms = histogram_words()
    for name, number in board.values().items():
        if name == "pages_total":
            assert sum(value(samples, "kv_pages", state=state) for state in ("used", "idle", "free")) == number
        elif name == "token_step_us":
            assert value(samples, "token_step_seconds") == number / 1e6
        elif name not in ("pid", "heartbeat_ns", *in_histograms):
            assert number in reported, f"{name} is nowhere in /metrics"
    for name, number in worker.items():
        assert name == "pid" or name in in_histograms or number in reported, f"{name} is nowhere in /metrics"


def histogram_words() -> set[str]:
    """Return the names of all words of the histograms on both boards."""
    own = [item for kind in (BackendBoard, FrontendBoard) for item in vars(kind).values()]
    words = {word for item in own if isinstance(item, Histogram) for word in item.words}
    return words | {Board.TOTALS + word for word in words}


@pytest.mark.parametrize(
    ("histogram", "name", "unit"),
    [
        (BackendBoard.cancel_to_free_us, "cancel_to_free_seconds", 1e6),
        (BackendBoard.step_us, "step_duration_seconds", 1e6),
        (BackendBoard.step_rows, "step_rows", 1),
        (BackendBoard.step_tokens, "step_tokens", 1),
        (FrontendBoard.ttft_us, "time_to_first_token_seconds", 1e6),
        (FrontendBoard.itl_us, "inter_token_latency_seconds", 1e6),
        (FrontendBoard.queue_us, "request_queue_time_seconds", 1e6),
        (FrontendBoard.latency_us, "e2e_request_latency_seconds", 1e6),
    ],
)
def test_histogram_is_cumulative_and_ends_with_its_count(histogram: Histogram, name: str, unit: float) -> None:
    observed = [0, 1, histogram.bounds[0], histogram.bounds[0] + 1, histogram.bounds[-1], histogram.bounds[-1] + 9]
    of_backend = histogram in vars(BackendBoard).values()
    written: Any = BackendBoard.private() if of_backend else FrontendBoard.private()
    field = next(key for key, item in vars(type(written)).items() if item is histogram)
    for number in observed:
        getattr(written, field).observe(number)
    backend = dict.fromkeys(BackendBoard.fields, 0)
    backend |= {word if of_backend else Board.TOTALS + word: written.values()[word] for word in histogram.words}
    samples = parse(render(1, [Source("m", NOTHING, backend)]))
    buckets = {
        dict(labels)["le"]: count for (sample, labels), count in samples.items() if sample == f"penstock_{name}_bucket"
    }
    assert list(buckets) == [*(f"{bound / unit:g}" for bound in histogram.bounds), "+Inf"]
    for bound, count in buckets.items():
        assert count == sum(number / unit <= float(bound) for number in observed)
    assert value(samples, f"{name}_count") == len(observed)
    assert value(samples, f"{name}_sum") == pytest.approx(sum(observed) / unit)


def test_step_metrics_of_the_engine_are_reported(board: BackendBoard) -> None:
    for duration_us, num_rows, num_tokens in ((400, 1, 1), (30_000, 64, 190), (9_000_000, 2, 8000)):
        board.observe_step(duration_us, num_rows, num_tokens)
    samples = parse(render(1, [Source("m", NOTHING, board.values())]))
    assert value(samples, "step_duration_seconds_bucket", le="0.04") == 2
    assert value(samples, "step_duration_seconds_sum") == pytest.approx(9.0304)
    assert value(samples, "step_rows_bucket", le="2") == 2
    assert value(samples, "step_tokens_sum") == 8191


async def test_request_latencies_are_counted_by_outcome(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = says("Hello", batch_size=1)
    for body in ({"prompt": "x", "max_tokens": 5}, {"prompt": "x", "stream": True}):
        assert (await connection.request("POST", "/v1/completions", body)).status == 200
    assert (await connection.request("POST", "/v1/completions", {"prompt": "x" * 2000})).status == 400
    backend.ready = False
    assert (await connection.request("POST", "/v1/completions", {"prompt": "x"})).status == 503
    counts = backend.counters
    for histogram in (FrontendBoard.ttft_us, FrontendBoard.latency_us):
        buckets, _ = histogram.read(counts)
        assert sum(buckets) == 2
    assert {name: counts[name] for name in RESPONSE_FIELDS if counts[name]} == {
        "responses_200": 2,
        "responses_400": 1,
        "responses_503": 1,
    }


def test_what_cluster_software_looks_for_has_vllms_names(board: BackendBoard) -> None:
    board.running, board.waiting, board.pages_used, board.pages_total, board.page_size_tokens = 3, 2, 25, 100, 32
    board.prompt_tokens, board.cached_tokens = 900, 600
    samples = parse(render(1, [Source(name, NOTHING, board.values()) for name in ('a "b"', "c")]))
    for model in ('a "b"', "c"):
        labels = {("engine", "0"), ("model_name", model)}
        for name, expected in (
            ("num_requests_running", 3),
            ("num_requests_waiting", 2),
            ("kv_cache_usage_perc", 0.25),
            ("prefix_cache_queries_total", 900),
            ("prefix_cache_hits_total", 600),
        ):
            assert samples[f"vllm:{name}", frozenset(labels)] == expected
        cache = labels | {("block_size", "32"), ("num_gpu_blocks", "100")}
        assert samples["vllm:cache_config_info", frozenset(cache)] == 1


def test_labels_are_bounded(board: BackendBoard) -> None:
    """The page has the same samples after any number of requests."""
    empty = render(1, [Source("m", NOTHING, board.values())])
    for name in BackendBoard.fields:
        if name not in ("pages_total", "page_size_tokens"):  # a label's value, fixed as long as a backend runs
            setattr(board, name, 1 << 62)
    full = render(1, [Source("m", dict.fromkeys(FrontendBoard.fields, 1 << 62), board.values())])
    assert set(parse(empty)) == set(parse(full))
    assert metrics.CONTENT_TYPE.startswith(b"text/plain")


def check_names(queries: str, board: BackendBoard) -> None:
    """Fail if queries name a metric that /metrics lacks, or a label that it does not have."""
    labels: dict[str, set[str]] = {}
    sources = [Source("m", NOTHING, board.values()), Source("n", NOTHING, board.values())]
    for name, pairs in parse(render(1, sources)):
        labels.setdefault(name, set()).update(key for key, _ in pairs)
    used = re.findall(r"\b(penstock_\w+)(?:\{([^}]*)\})?", queries)
    assert len(used) >= 10
    for name, selector in used:
        assert name in labels, name
        assert set(re.findall(r"(\w+)=~?\"", selector)) - {"job", "instance"} <= labels[name], selector
    for named in re.findall(r"by \(([^)]*)\)", queries):
        assert set(re.split(r",\s*", named)) - {"job", "instance"} <= set().union(*labels.values()), named


def test_dashboard_uses_metrics_that_exist_and_labels_that_they_have(board: BackendBoard) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    check_names("\n".join(queries), board)
    positions = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(position["x"] >= 0 and position["x"] + position["w"] <= 24 for position in positions)


def test_alerts_use_metrics_that_exist_and_labels_that_they_have(board: BackendBoard) -> None:
    check_names(re.sub(r"(summary|description): .*", "", ALERTS.read_text(encoding="utf-8")), board)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
def test_each_alert_fires_on_its_fault_and_only_then(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    cases = tmp_path / "cases.yml"
    cases.write_text(Path(__file__).with_name("alert_cases.yml").read_text().replace("ALERTS", str(ALERTS)))
    for command in (["check", "rules", ALERTS], ["test", "rules", cases]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"alert: (\w+)", ALERTS.read_text())
    fired = re.findall(r"alertname: (\w+)\n +exp_alerts", cases.read_text())
    assert sorted(names) == sorted(fired)
