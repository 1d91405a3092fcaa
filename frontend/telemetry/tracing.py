"""Spans of requests for OpenTelemetry, with the attributes of its conventions for generative AI.

A request has one span, and below it one for each of its parts: preparing it, waiting in the backend's queue, prefill,
decode, and delivering the rest after the last token. Spans are made when the request ends, so tracing costs a running
request nothing. A thread of the SDK sends them; if the collector is slow, the SDK drops spans.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from penstock.frontend.telemetry.request_log import RequestLogEntry
    from penstock.frontend.telemetry.trace_context import TraceContext

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/embeddings": "embeddings",
    "/v1/embed": "embeddings",
    "/v2/embed": "embeddings",
}
_EXPORT_TIMEOUT_S = 5


class TracingUnavailable(Exception):
    """The packages of OpenTelemetry are not installed. The message is one line with the remedy."""


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to a collector's URL for traces (OTLP over HTTP). Raises TracingUnavailable."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable(f"--otlp-endpoint needs pip install 'penstock[otel]': {error}") from error
    return OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)


class SpanReporter:
    """Makes the spans of requests that have ended."""

    def __init__(self, exporter: SpanExporter, sample_ratio: float) -> None:
        """sample_ratio is the share of requests that are traced, unless their caller decides."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._provider: TracerProvider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": "penstock"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")

    def report(self, entry: RequestLogEntry, ended_s: float) -> str:
        """Make the spans; ended_s is a monotonic time. Return the trace's id as 32 hexadecimal digits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context

        offset_s = time.time() - time.monotonic()

        def ns(monotonic_s: float) -> int:
            return int(1e9 * (monotonic_s + offset_s))

        operation = _OPERATIONS.get(entry.path, entry.path.rpartition("/")[2])
        span = self._tracer.start_span(
            f"{operation} {entry.model}",
            _parent(entry.trace),
            SpanKind.SERVER,
            _attributes(entry, operation),
            start_time=ns(entry.received_s),
        )
        if span.is_recording():
            if entry.finish_reason in ("error", "timeout"):
                span.set_status(Status(StatusCode.ERROR, entry.finish_reason))
            inside = set_span_in_context(span)
            for name, start_s, end_s in _parts(entry, ended_s):
                self._tracer.start_span(name, inside, start_time=ns(start_s)).end(ns(end_s))
        span.end(ns(ended_s))
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send the remaining spans. Waits for the collector, but not for long."""
        self._provider.shutdown()


def _parent(trace: TraceContext | None) -> Context | None:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if trace is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT)
    caller = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(caller))


def _attributes(entry: RequestLogEntry, operation: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.model": entry.model,
        "gen_ai.response.id": entry.request_id,
        "gen_ai.response.finish_reasons": (entry.finish_reason,),
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": entry.cached_tokens,
        "url.path": entry.path,
        "penstock.http_request_id": entry.http_request_id,
        "penstock.coalesced": entry.coalesced == "joined",
    }
    if entry.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = entry.max_tokens
    if entry.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = entry.first_token_s - entry.received_s
    return attributes


def _parts(entry: RequestLogEntry, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of the parts that the request reached, one after the other."""
    if entry.submitted_s is None:
        yield "prepare", entry.received_s, ended_s
        return
    yield "prepare", entry.received_s, entry.submitted_s
    first_token_s = entry.first_token_s
    if not entry.queue_s and first_token_s is None:
        yield "queue", entry.submitted_s, ended_s
        return
    started_s = min(entry.submitted_s + entry.queue_s, first_token_s or ended_s)
    yield "queue", entry.submitted_s, started_s
    if first_token_s is None:
        yield "compute", started_s, ended_s
        return
    yield "prefill", started_s, first_token_s
    last_token_s = entry.last_token_s or first_token_s
    yield "decode", first_token_s, last_token_s
    yield "deliver", last_token_s, ended_s
