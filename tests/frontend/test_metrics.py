"""GET /metrics, read by a parser written from the format's description."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from frontend import metrics
from frontend.metrics import render
from shm.board import BackendBoard, FrontendBoard
from tests.frontend.harness import Connection, FakeBackend, make_app

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{({NAME}="[^"\\]*"(?:,{NAME}="[^"\\]*")*)\}})? (\S+)')
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(page: bytes) -> Samples:
    """Every sample, having checked that it follows its family's HELP and TYPE, each once."""
    text = page.decode()
    assert text.endswith("\n")
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
            assert family not in helped
            assert len(line.split(" ", 3)[3]) > 5
            helped.add(family)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family
            assert name not in kinds
            kinds[name] = kind
            assert (kind == "counter") == name.endswith("_total")
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name, labels, value = match.groups()
            suffixes = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
            assert name in {family + suffix for suffix in suffixes}
            key = name, frozenset(re.findall(rf'({NAME})="([^"]*)"', labels or ""))
            assert key not in samples
            samples[key] = float(value)
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"penstock_{name}", frozenset(labels.items())]


@pytest.fixture
def board() -> Iterator[BackendBoard]:
    board = BackendBoard.create()
    yield board
    board.close()


async def test_it_is_prometheus_text_and_needs_no_key(backend: FakeBackend, board: BackendBoard) -> None:
    backend.backend_counters = board.values()
    connection = Connection(make_app(backend, api_keys=("secret",)))
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


async def test_without_a_backend_the_workers_own_numbers_are_told(backend: FakeBackend) -> None:
    backend.backend_counters, backend.ready, backend.model = None, False, None
    backend.counters["tokens_streamed"] = 7
    connection = Connection(make_app(backend))
    samples = parse((await connection.request("GET", "/metrics")).body)
    assert value(samples, "backend_up") == 0
    assert value(samples, "worker_tokens_streamed_total", worker=str(os.getpid())) == 7
    assert all(name == "penstock_backend_up" or name.startswith("penstock_worker_") for name, _ in samples)
    await connection.end()


def test_every_number_of_the_boards_is_told_as_it_stands(board: BackendBoard) -> None:
    for number, name in enumerate(BackendBoard.fields, start=1000):
        setattr(board, name, number)
    board.pages_used, board.pages_idle, board.pages_total = 11, 22, 100
    worker = {name: number for number, name in enumerate(FrontendBoard.fields, start=2000)}
    samples = parse(render(1, worker, {}, board.values()))
    told = set(samples.values())
    for name, number in board.values().items():
        if name == "cancel_to_free_sum_us":
            assert value(samples, "cancel_to_free_seconds_sum") == pytest.approx(number / 1e6)
        elif name.startswith("cancel_to_free_le_"):
            assert number > board.cancel_to_free_count  # and so cut to it
        elif name == "pages_total":
            assert sum(value(samples, "kv_pages", state=state) for state in ("used", "idle", "free")) == number
        elif name not in ("pid", "heartbeat_ns"):
            assert number in told, f"{name} is nowhere in /metrics"
    for name, number in worker.items():
        assert name == "pid" or number in told, f"{name} is nowhere in /metrics"


def test_the_histogram_is_cumulative_and_ends_with_its_count(board: BackendBoard) -> None:
    durations_us = (500, 900, 4000, 90_000, 700_000)
    for duration_us in durations_us:
        board.observe_cancel(duration_us)
    samples = parse(render(1, dict.fromkeys(FrontendBoard.fields, 0), {}, board.values()))
    bounds_s = ("0.001", "0.005", "0.02", "0.1", "0.5", "+Inf")
    buckets = [value(samples, "cancel_to_free_seconds_bucket", le=bound) for bound in bounds_s]
    assert buckets == [sum(us <= float(bound) * 1e6 for us in durations_us) for bound in bounds_s]
    assert value(samples, "cancel_to_free_seconds_count") == buckets[-1] == 5
    assert value(samples, "cancel_to_free_seconds_sum") == pytest.approx(sum(durations_us) / 1e6)


def test_labels_are_bounded(board: BackendBoard) -> None:
    """However many requests came, the page has the same samples."""
    empty = render(1, dict.fromkeys(FrontendBoard.fields, 0), {200: 1}, board.values())
    board.requests_accepted = board.requests_finished = 1 << 62
    full = render(1, dict.fromkeys(FrontendBoard.fields, 1 << 62), {200: 1 << 62}, board.values())
    assert set(parse(empty)) == set(parse(full))
    assert metrics.CONTENT_TYPE.startswith(b"text/plain")
