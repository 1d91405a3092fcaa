"""The text of GET /metrics, in Prometheus' text format, version 0.0.4.

Metrics without a worker label describe the whole system and are the same from every worker: they come from the
backend's board, which has the backend's own counters and the sums of all frontends since the backend started. Metrics
with a worker label are that worker's own, since its start.

If a worker has several backends, all metrics have a label with the model, and those of replicas one with the replica.
Numbers that a cluster's routers, autoscalers and dashboards read are repeated under vLLM's names and labels. llm-d, the
Gateway API inference extension and KEDA rules read these without configuration. See
https://docs.vllm.ai/en/latest/design/metrics/.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.shm.memory.board import RESPONSE_FIELDS, BackendBoard, Board, FrontendBoard, Histogram

Counters = Mapping[str, int]

# (name, kind, help, the board's field)
_VLLM_NUMBERS = (
    ("num_requests_running", "gauge", "Sequences being computed.", "running"),
    ("num_requests_waiting", "gauge", "Sequences waiting to be admitted.", "waiting"),
    ("num_preemptions_total", "counter", "Sequences preempted because KV cache pages ran out.", "preemptions"),
    ("prompt_tokens_total", "counter", "Prompt tokens of sequences.", "prompt_tokens"),
    ("generation_tokens_total", "counter", "Tokens sampled.", "generated_tokens"),
    ("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", "cached_tokens"),
)
_VLLM_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", FrontendBoard.ttft_us),
    ("inter_token_latency_seconds", "Between a stream's tokens.", FrontendBoard.itl_us),
    ("request_queue_time_seconds", "From a request's receipt to its first step.", FrontendBoard.queue_us),
    ("e2e_request_latency_seconds", "From a request's arrival to its end.", FrontendBoard.latency_us),
)


def add_vllm_metrics(page: MetricsPage, model: str, engine: int, board: Mapping[str, int]) -> None:
    """engine is the number of the backend among those of the model."""
    page.labels = f'engine="{engine}",model_name="{escaped(model)}"'
    for name, kind, help_text, field in _VLLM_NUMBERS:
        page.add(name, kind, help_text, [("", board[field])])
    total = board["pages_total"]
    usage = board["pages_used"] / total if total else 0.0
    page.add("kv_cache_usage_perc", "gauge", "Share of all KV cache pages that sequences use; 1 is all.", [("", usage)])
    cache = f'block_size="{board["page_size_tokens"]}",num_gpu_blocks="{total}"'
    page.add("cache_config_info", "gauge", "The KV cache: tokens of a page, and pages.", [(cache, 1)])
    page.add(
        "request_success_total",
        "counter",
        "Token streams that ended by themselves, by the reason.",
        [(f'finished_reason="{reason}"', board[f"{Board.TOTALS}requests_{reason}"]) for reason in ("stop", "length")],
    )
    for name, help_text, histogram in _VLLM_HISTOGRAMS:
        page.add_histogram(name, help_text, histogram, _US, board, Board.TOTALS)


class MetricsPage:
    """Families in the order in which they were first added; each has the samples of all sources together."""

    def __init__(self, prefix: str) -> None:
        """prefix begins all names."""
        self._prefix = prefix
        self.labels = ""
        """Labels that are added to those of each sample."""
        self._families: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
        lines = self._family(name, kind, help_text)
        lines += [f"{self._prefix}{name}{self._braced(labels)} {value}" for labels, value in samples]

    def add_histogram(
        self, name: str, help_text: str, histogram: Histogram, unit: float, board: Counters, prefix: str = ""
    ) -> None:
        buckets, total = histogram.read(board, prefix)
        lines = self._family(name, "histogram", help_text)
        bounds = [*(f"{bound / unit:g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(buckets), strict=True):
            limit = f'le="{bound}"'
            lines.append(f"{self._prefix}{name}_bucket{self._braced(limit)} {count}")
        labels, full_name = self._braced(""), self._prefix + name
        lines += [f"{full_name}_sum{labels} {total / unit}", f"{full_name}_count{labels} {sum(buckets)}"]

    def text(self) -> bytes:
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines).encode()

    def _family(self, name: str, kind: str, help_text: str) -> list[str]:
        head = [f"# HELP {self._prefix}{name} {help_text}", f"# TYPE {self._prefix}{name} {kind}"]
        return self._families.setdefault(name, head)

    def _braced(self, labels: str) -> str:
        joined = ",".join(part for part in (self.labels, labels) if part)
        return f"{{{joined}}}" if joined else ""


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_US = 1e6
# (name, help, the board's field)
_BACKEND_GAUGES = (
    ("backend_draining", "1 once the backend accepts nothing new.", "draining"),
    ("frontends", "Frontend processes that are connected.", "frontends"),
    ("sequences_running", "Sequences being computed.", "running"),
    ("sequences_waiting", "Sequences waiting to be admitted.", "waiting"),
    ("kv_page_size_tokens", "Tokens of a KV cache page; 0 without a cache.", "page_size_tokens"),
    ("kv_host_pages", "KV cache pages with a copy in host memory.", "host_pages_used"),
    ("vector_cache_bytes", "Vectors kept for equal inputs.", "vector_cache_bytes"),
    ("lingering_streams", "Streams of which something is kept for their readers.", "lingering_streams"),
    ("lingering_bytes", "Kept requests and answers of lingering streams.", "lingering_bytes"),
    ("held_weights_bytes", "Packed weights in memory that outlives the backend.", "shared_weights_bytes"),
    ("held_weights_mapped", "1 if the backend found them there; 0 if it has loaded them.", "shared_weights_mapped"),
    ("sequences_waiting_limit", "Sequences that may wait before new requests get 429.", "max_waiting"),
)
_BACKEND_COUNTERS = (
    ("steps_total", "Forward passes.", "steps"),
    ("preemptions_total", "Sequences preempted because KV cache pages ran out.", "preemptions"),
    ("kv_pages_saved_total", "Pages copied to host memory before they were reused.", "pages_saved"),
    ("kv_pages_restored_total", "Pages copied back from host memory instead of being recomputed.", "pages_restored"),
    ("vector_cache_hits_total", "Pooled requests whose vector was in the cache.", "vector_cache_hits"),
    ("vector_cache_misses_total", "Pooled requests whose vector was not in the cache.", "vector_cache_misses"),
    ("held_weights_checks_total", "Blocks of shared weights compared with their checksums.", "shared_weights_checks"),
    ("requests_accepted_total", "Requests that the backend accepted.", "requests_accepted"),
    ("requests_coalesced_total", "Requests that joined another request's sequence.", "requests_coalesced"),
    ("streams_reattached_total", "Times that a client came back to a lingering stream.", "streams_reattached"),
    ("prompt_tokens_total", "Prompt tokens of sequences; a coalesced request adds none.", "prompt_tokens"),
    ("cached_tokens_total", "Prompt tokens served from the prefix cache.", "cached_tokens"),
    ("generated_tokens_total", "Tokens sampled; requests that share a sequence count once.", "generated_tokens"),
    (
        "computed_tokens_total",
        "Prompt and answer tokens of all steps, recomputed ones included.",
        "computed_tokens",
    ),
    ("wasted_tokens_total", "Computed tokens that were no longer needed when they were ready.", "wasted_tokens"),
    ("drafted_tokens_total", "Guessed tokens that steps have verified.", "drafted_tokens"),
    ("accepted_tokens_total", "Guessed tokens that came true.", "accepted_tokens"),
)
_BACKEND_OUTCOMES = ("finished", "cancelled", "rejected", "failed", "expired", "quoted")
# (name, help, the board's histogram, the histogram's units per unit of the metric)
_BACKEND_HISTOGRAMS = (
    (
        "cancel_to_free_seconds",
        "From noticing a client's hang-up to its pages being free.",
        BackendBoard.cancel_to_free_us,
        _US,
    ),
    ("step_duration_seconds", "From a step's launch to its result.", BackendBoard.step_us, _US),
    ("step_rows", "Sequences that had tokens in a step.", BackendBoard.step_rows, 1),
    (
        "quote_error_first_token_seconds",
        "First token's time as predicted on arrival, minus the actual one; negative: it came later.",
        BackendBoard.quote_error_first_token_us,
        _US,
    ),
    (
        "quote_error_finish_seconds",
        "End of the answer as predicted on arrival, minus the actual one; negative: it came later.",
        BackendBoard.quote_error_finish_us,
        _US,
    ),
    ("step_tokens", "Prompt and answer tokens that a step computed.", BackendBoard.step_tokens, 1),
)
_FRONTEND_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", FrontendBoard.ttft_us, _US),
    ("inter_token_latency_seconds", "Between a stream's tokens.", FrontendBoard.itl_us, _US),
    (
        "request_queue_time_seconds",
        "From the backend's receipt to the first step; coalesced requests are not counted.",
        FrontendBoard.queue_us,
        _US,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's arrival to its end, for requests that were answered completely.",
        FrontendBoard.latency_us,
        _US,
    ),
)
_STREAM_OUTCOMES = ("stop", "length", "cancelled", "rejected", "failed", "expired", "quoted")


@dataclass(frozen=True, slots=True)
class Source:
    """The numbers of one backend's boards by field: this worker's, and the backend's own."""

    model: str
    worker: Counters
    backend: Counters | None
    """None when it is not connected."""
    replica: str = ""
    """Its name among the backends of the model; empty if there is only one."""
    num_adapters: int = 0


def render(worker_pid: int, sources: Sequence[Source]) -> bytes:
    """Return the whole page.

    With several sources every sample has a label with the model; samples of replicas also have one with the replica.
    """
    engines: Counter[str] = Counter()
    page, vllm_page = MetricsPage("penstock_"), MetricsPage("vllm:")
    for source in sources:
        page.labels = f'model="{escaped(source.model)}"' if len(sources) > 1 or source.replica else ""
        if source.replica:
            page.labels += f',replica="{escaped(source.replica)}"'
        engine = engines[source.model]
        engines[source.model] += 1
        backend = source.backend
        up = "1 while this worker is connected to a backend."
        page.add("backend_up", "gauge", up, [("", int(bool(backend)))])
        if backend is not None:
            page.add("lora_adapters", "gauge", "LoRA adapters that requests can name.", [("", source.num_adapters)])
            _backend(page, backend)
            _streams(page, "", "", {name: backend.get(Board.TOTALS + name, 0) for name in source.worker})
            for name, help_text, histogram, unit in _FRONTEND_HISTOGRAMS:
                page.add_histogram(name, help_text, histogram, unit, backend, Board.TOTALS)
            add_vllm_metrics(vllm_page, source.model, engine, backend)
        _streams(page, "worker_", f'worker="{worker_pid}"', source.worker)
    return page.text() + vllm_page.text()


def _backend(page: MetricsPage, board: Counters) -> None:
    for kind, families in (("gauge", _BACKEND_GAUGES), ("counter", _BACKEND_COUNTERS)):
        for name, help_text, field in families:
            page.add(name, kind, help_text, [("", board[field])])
    beat_age_s = max(0, time.monotonic_ns() - board["heartbeat_ns"]) / 1e9
    page.add(
        "backend_heartbeat_age_seconds", "gauge", "Time since the engine's last loop iteration.", [("", beat_age_s)]
    )
    page.add(
        "token_step_seconds",
        "gauge",
        "A step of one token, measured at the start; 0 if the model does not generate.",
        [("", board["token_step_us"] / _US)],
    )
    used, idle, total = board["pages_used"], board["pages_idle"], board["pages_total"]
    # The fields are not read at one moment, so the sum can be off.
    pages = {"used": used, "idle": idle, "free": max(0, total - used - idle)}
    page.add(
        "kv_pages",
        "gauge",
        "KV cache pages: used by sequences, idle (cached content), free.",
        [(f'state="{state}"', count) for state, count in pages.items()],
    )
    page.add(
        "kv_checkpoint_bytes",
        "gauge",
        "Memory of the recurrent states with which cached prefixes go on.",
        [("", board["checkpoint_bytes"])],
    )
    usage = used / total if total else 0.0
    page.add("kv_cache_usage_ratio", "gauge", "Share of all pages that sequences use.", [("", usage)])
    page.add(
        "requests_total",
        "counter",
        "Requests by outcome in the backend.",
        [(f'outcome="{outcome}"', board[f"requests_{outcome}"]) for outcome in _BACKEND_OUTCOMES],
    )
    for name, help_text, histogram, unit in _BACKEND_HISTOGRAMS:
        page.add_histogram(name, help_text, histogram, unit, board)


def _streams(page: MetricsPage, prefix: str, label: str, board: Counters) -> None:
    """Add the frontends' counts, for one worker or for all together."""
    more = f"{label}," if label else ""
    page.add(f"{prefix}streams_open", "gauge", "Token streams open now.", [(label, board["requests_open"])])
    page.add(
        f"{prefix}streams_total",
        "counter",
        "Token streams by outcome; a request has one per choice.",
        [(f'{more}outcome="{outcome}"', board[f"requests_{outcome}"]) for outcome in _STREAM_OUTCOMES],
    )
    page.add(
        f"{prefix}streams_resumed_total",
        "counter",
        "Token streams continued on another backend after theirs died.",
        [(label, board["requests_resumed"])],
    )
    page.add(
        f"{prefix}tokens_streamed_total",
        "counter",
        "Tokens that streams received.",
        [(label, board["tokens_streamed"])],
    )
    page.add(
        f"{prefix}http_responses_total",
        "counter",
        "HTTP answers by status.",
        [(f'{more}status="{name.removeprefix("responses_")}"', board[name]) for name in RESPONSE_FIELDS],
    )
