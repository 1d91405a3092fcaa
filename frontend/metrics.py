"""GET /metrics: the backend's board and this worker's counters in Prometheus' text format, version 0.0.4.

The backend's numbers are the whole system's and the same whoever is asked; the worker's own have its pid as a label.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Counters = Mapping[str, int]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# (name, help, the board's field)
_BACKEND_GAUGES = (
    ("backend_draining", "1 once the backend accepts nothing new.", "draining"),
    ("sequences_running", "Sequences being computed.", "running"),
    ("sequences_waiting", "Sequences that wait to be admitted.", "waiting"),
    ("sequences_waiting_limit", "Sequences that may wait before new requests are answered 429.", "max_waiting"),
)
_BACKEND_COUNTERS = (
    ("steps_total", "Forward passes.", "steps"),
    ("preemptions_total", "Sequences set back because pages were short.", "preemptions"),
    ("requests_accepted_total", "Requests that the backend took on.", "requests_accepted"),
    ("requests_coalesced_total", "Requests that joined a sequence another had started.", "requests_coalesced"),
    ("prompt_tokens_total", "Prompt tokens of sequences; a request that joined brings none.", "prompt_tokens"),
    ("cached_tokens_total", "Prompt tokens that requests got from kept pages.", "cached_tokens"),
    ("generated_tokens_total", "Tokens sampled; one for all that share a sequence.", "generated_tokens"),
    ("computed_tokens_total", "Tokens of prompts and answers in all steps, repeated work included.", "computed_tokens"),
    ("wasted_tokens_total", "Computed tokens that nobody wanted any more when they were there.", "wasted_tokens"),
)
_BACKEND_OUTCOMES = ("finished", "cancelled", "rejected", "failed", "expired")
_WORKER_OUTCOMES = ("stop", "length", "cancelled", "rejected", "failed", "expired")
_CANCEL_BUCKETS_MS = (1, 5, 20, 100, 500)


def render(worker_pid: int, worker: Counters, statuses: Mapping[int, int], backend: Counters | None) -> bytes:
    """The whole page. worker and backend are boards' fields; statuses counts this worker's HTTP answers."""
    lines = _family("backend_up", "gauge", "1 while this worker is connected to a backend.", [("", int(bool(backend)))])
    if backend is not None:
        lines += _backend(backend)
    lines += _worker(f'worker="{worker_pid}"', worker, statuses)
    return ("\n".join(lines) + "\n").encode()


def _backend(board: Counters) -> list[str]:
    lines: list[str] = []
    for kind, families in (("gauge", _BACKEND_GAUGES), ("counter", _BACKEND_COUNTERS)):
        for name, help_text, field in families:
            lines += _family(name, kind, help_text, [("", board[field])])
    beat_age_s = max(0, time.monotonic_ns() - board["heartbeat_ns"]) / 1e9
    lines += _family("backend_heartbeat_age_seconds", "gauge", "Since the engine's last turn.", [("", beat_age_s)])
    used, idle = board["pages_used"], board["pages_idle"]
    # The fields are not of one moment.
    pages = {"used": used, "idle": idle, "free": max(0, board["pages_total"] - used - idle)}
    lines += _family(
        "kv_pages",
        "gauge",
        "Pages of the KV cache: used by sequences, idle but kept for their content, free.",
        [(f'state="{state}"', count) for state, count in pages.items()],
    )
    lines += _family(
        "requests_total",
        "counter",
        "Requests by how they ended in the backend.",
        [(f'outcome="{outcome}"', board[f"requests_{outcome}"]) for outcome in _BACKEND_OUTCOMES],
    )
    return lines + _cancel_to_free(board)


def _cancel_to_free(board: Counters) -> list[str]:
    name = "penstock_cancel_to_free_seconds"
    count = board["cancel_to_free_count"]
    lines = _head(name, "histogram", "From noticing that a client has gone to its pages being free.")
    in_bucket = 0
    for limit_ms in _CANCEL_BUCKETS_MS:
        # The board may be written while it is read; buckets must never fall, nor be above the count.
        in_bucket = min(count, max(in_bucket, board[f"cancel_to_free_le_{limit_ms}ms"]))
        lines.append(f'{name}_bucket{{le="{limit_ms / 1000:g}"}} {in_bucket}')
    lines.append(f'{name}_bucket{{le="+Inf"}} {count}')
    lines.append(f"{name}_sum {board['cancel_to_free_sum_us'] / 1e6}")
    lines.append(f"{name}_count {count}")
    return lines


def _worker(label: str, worker: Counters, statuses: Mapping[int, int]) -> list[str]:
    lines = _family("worker_streams_open", "gauge", "Token streams open now.", [(label, worker["requests_open"])])
    lines += _family(
        "worker_streams_total",
        "counter",
        "Token streams by how they ended; a request has one for each choice.",
        [(f'{label},outcome="{outcome}"', worker[f"requests_{outcome}"]) for outcome in _WORKER_OUTCOMES],
    )
    lines += _family(
        "worker_streams_resumed_total",
        "counter",
        "Token streams taken to another backend when theirs had died.",
        [(label, worker["requests_resumed"])],
    )
    lines += _family(
        "worker_tokens_streamed_total", "counter", "Tokens received.", [(label, worker["tokens_streamed"])]
    )
    return lines + _family(
        "worker_http_responses_total",
        "counter",
        "HTTP answers by status.",
        [(f'{label},status="{status}"', count) for status, count in sorted(statuses.items())],
    )


def _family(name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    name = f"penstock_{name}"
    lines = _head(name, kind, help_text)
    lines += [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples]
    return lines


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
