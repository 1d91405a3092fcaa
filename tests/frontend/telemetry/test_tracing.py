"""Spans of requests: through the whole application, and as a collector receives them."""

from __future__ import annotations

import gzip
import logging
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.frontend.telemetry.trace_context import TraceContext, parse_traceparent
from penstock.frontend.telemetry.tracing import SpanReporter, TracingUnavailable, otlp_exporter
from penstock.shm.client import TokenBatch
from penstock.shm.messages import FailureCode, Finish
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, says

if TYPE_CHECKING:
    from types import FrameType

    from opentelemetry.sdk.trace import ReadableSpan

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}


class Tracing:
    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.reporter = SpanReporter(self._exporter, ratio)

    def spans(self) -> dict[str, ReadableSpan]:
        """The spans by name."""
        finished = self.finished()
        spans = {span.name: span for span in finished}
        assert len(spans) == len(finished)
        return spans

    def finished(self) -> tuple[ReadableSpan, ...]:
        self.reporter.close()
        return self._exporter.get_finished_spans()


async def ask(backend: FakeBackend, tracing: Tracing, *headers: tuple[str, str]) -> int:
    connection = ClientConnection(make_app(backend, report_spans=tracing.reporter.report))
    response = await connection.request("POST", "/v1/chat/completions", CHAT, headers)
    await connection.idle()
    await connection.end()
    return response.status


async def test_request_is_a_span_with_a_part_for_each_stage(backend: FakeBackend) -> None:
    backend.script = says("Hello, world!")
    tracing = Tracing()
    assert await ask(backend, tracing) == 200
    spans = tracing.spans()
    whole = spans.pop(f"chat {backend.model.model_id}")
    assert whole.kind is SpanKind.SERVER
    attributes = dict(whole.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.output_tokens"] == 12
    assert attributes["gen_ai.request.max_tokens"] == 12
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["url.path"] == "/v1/chat/completions"
    assert "Hello" not in str(attributes)
    assert list(spans) == ["prepare", "queue", "prefill", "decode", "deliver"]
    times = [whole.start_time]
    for part in spans.values():
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
        assert part.start_time == times[-1]
        times.append(part.end_time)
    assert times[-1] == whole.end_time
    assert times == sorted(times, key=lambda time: time or 0)


async def test_callers_trace_goes_on_and_is_in_the_log(backend: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    backend.script = says("Hello")
    tracing = Tracing(ratio=0.0)
    with caplog.at_level(logging.INFO, "penstock.request"):
        await ask(backend, tracing, ("traceparent", TRACEPARENT))
        await ask(backend, tracing)
    (whole,) = (span for span in tracing.spans().values() if span.kind is SpanKind.SERVER)
    assert whole.parent is not None
    assert (format_trace_id(whole.context.trace_id), format_span_id(whole.parent.span_id)) == (TRACE_ID, SPAN_ID)
    logged = [record.fields["trace_id"] for record in caplog.records if hasattr(record, "fields")]
    assert logged[0] == TRACE_ID != logged[1]


async def test_caller_that_does_not_record_decides_for_its_request(backend: FakeBackend) -> None:
    backend.script = says("Hello")
    tracing = Tracing()
    await ask(backend, tracing, ("traceparent", TRACEPARENT.removesuffix("01") + "00"))
    assert tracing.spans() == {}


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_share_of_the_traces_is_chosen_by_their_ids(ratio: float) -> None:
    """The rule of TraceIdRatioBased: the lower 64 bits of a trace's id decide, so that every service
    chooses the same."""
    tracing = Tracing(ratio)
    ids = [tracing.reporter.report(RequestLogEntry("r", 0.0, model="m"), 1.0) for _ in range(300)]
    recorded = {format_trace_id(span.context.trace_id) for span in tracing.finished() if span.kind is SpanKind.SERVER}
    assert len(set(ids)) == len(ids)
    assert recorded == {trace_id for trace_id in ids if int(trace_id[16:], 16) < round(ratio * 2**64)}


@pytest.mark.parametrize(("flags", "is_recorded"), [("00", False), ("01", True)])
def test_callers_decision_holds_whatever_the_ratio(flags: str, is_recorded: bool) -> None:
    trace = parse_traceparent(f"00-{TRACE_ID}-{SPAN_ID}-{flags}".encode())
    for ratio in (0.0, 1.0):
        tracing = Tracing(ratio)
        assert tracing.reporter.report(RequestLogEntry("r", 0.0, trace=trace, model="m"), 1.0) == TRACE_ID
        assert bool(tracing.finished()) is is_recorded


def test_frontend_without_tracing_imports_nothing_of_opentelemetry() -> None:
    code = "import sys, penstock.frontend.main, penstock.frontend.worker, penstock.frontend.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "penstock.frontend.telemetry.tracing" in modules
    assert not [name for name in modules if name.startswith("opentelemetry")]


async def calls_of(backend: FakeBackend, num_tokens: int, tracing: Tracing | None) -> Counter[bool]:
    """Function calls during a streamed answer, by whether they are of tracing."""
    backend.script = says("x" * num_tokens)
    connection = ClientConnection(make_app(backend, report_spans=tracing and tracing.reporter.report))
    counts: Counter[bool] = Counter()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            counts[file.endswith("telemetry/tracing.py") or "/opentelemetry/" in file] += 1

    sys.setprofile(count)
    try:
        body = CHAT | {"stream": True, "max_tokens": num_tokens}
        assert (await connection.request("POST", "/v1/chat/completions", body)).status == 200
        await connection.idle()
    finally:
        sys.setprofile(None)
    await connection.end()
    return counts


async def test_tokens_cost_tracing_no_call_and_without_it_requests_neither(backend: FakeBackend) -> None:
    few, many = [await calls_of(backend, num_tokens, None) for num_tokens in (20, 200)]
    assert few[True] == many[True] == 0
    assert many[False] > few[False] + 180  # the count sees what tokens cost otherwise
    tracing = Tracing()
    few, many = [await calls_of(backend, num_tokens, tracing) for num_tokens in (20, 200)]
    tracing.reporter.close()
    assert few[True] == many[True] > 0


async def test_request_that_fails_has_a_span_with_an_error(backend: FakeBackend) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.FAILED, FailureCode.INTERNAL)]
    tracing = Tracing()
    assert await ask(backend, tracing) == 500
    spans = tracing.spans()
    assert spans[f"chat {backend.model.model_id}"].status.status_code is StatusCode.ERROR
    assert set(spans) - {f"chat {backend.model.model_id}"} == {"prepare", "queue"}


def test_without_tracing_a_log_line_has_the_callers_trace(caplog: pytest.LogCaptureFixture) -> None:
    entry = RequestLogEntry("r", 0.0, trace=TraceContext(TRACE_ID, SPAN_ID, is_sampled=True))
    with caplog.at_level(logging.INFO, "penstock.request"):
        entry.observe(NoBoard(), 1.0)  # type: ignore[arg-type]
    assert f"trace_id={TRACE_ID}" in caplog.text


class NoBoard:
    """A board for a request that failed: nothing is counted."""


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"{TRACEPARENT}-more",
        f"{TRACEPARENT}, {TRACEPARENT}",
    ],
)
def test_invalid_header_is_ignored(value: str) -> None:
    assert parse_traceparent(value.encode()) is None


@given(st.binary(max_size=80))
def test_any_bytes_are_ignored(value: bytes) -> None:
    assert parse_traceparent(value) is None


def test_later_version_of_the_header_is_read() -> None:
    assert parse_traceparent(f"01-{TRACE_ID}-{SPAN_ID}-00-more".encode()) == TraceContext(
        TRACE_ID, SPAN_ID, is_sampled=False
    )


def collector(received: list[bytes]) -> HTTPServer:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    return HTTPServer(("127.0.0.1", 0), Collector)


async def test_collector_receives_the_spans(backend: FakeBackend) -> None:
    received: list[bytes] = []
    with collector(received) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracing = Tracing()
        tracing.reporter = SpanReporter(otlp_exporter(f"http://127.0.0.1:{server.server_port}/v1/traces"), 1.0)
        backend.script = says("Hello")
        await ask(backend, tracing, ("traceparent", TRACEPARENT))
        tracing.reporter.close()
        server.shutdown()
        thread.join()
    request = ExportTraceServiceRequest.FromString(received[0])
    (resource,) = request.resource_spans
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"] == "penstock"
    spans = resource.scope_spans[0].spans
    assert {span.name for span in spans} >= {f"chat {backend.model.model_id}", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingUnavailable, match=r"--otlp-endpoint needs pip install 'penstock\[otel\]'"):
        otlp_exporter("http://127.0.0.1:4318/v1/traces")
