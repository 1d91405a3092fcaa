"""The numbers that a cluster's routers, autoscalers and dashboards read, under vLLM's names.

llm-d, the Gateway API inference extension and KEDA rules read these without configuration. The labels are vLLM's:
engine and model_name. See https://docs.vllm.ai/en/latest/design/metrics/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.telemetry.prometheus_text import escaped
from penstock.shm.memory.board import Board, FrontendBoard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.frontend.telemetry.prometheus_text import MetricsPage

_US = 1e6
# (name, kind, help, the board's field)
_NUMBERS = (
    ("num_requests_running", "gauge", "Sequences being computed.", "running"),
    ("num_requests_waiting", "gauge", "Sequences waiting to be admitted.", "waiting"),
    ("num_preemptions_total", "counter", "Sequences preempted because KV cache pages ran out.", "preemptions"),
    ("prompt_tokens_total", "counter", "Prompt tokens of sequences.", "prompt_tokens"),
    ("generation_tokens_total", "counter", "Tokens sampled.", "generated_tokens"),
    ("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", "prompt_tokens"),
    ("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", "cached_tokens"),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", FrontendBoard.ttft_us),
    ("inter_token_latency_seconds", "Between a stream's tokens.", FrontendBoard.itl_us),
    ("request_queue_time_seconds", "From a request's receipt to its first step.", FrontendBoard.queue_us),
    ("e2e_request_latency_seconds", "From a request's arrival to its end.", FrontendBoard.latency_us),
)


def add_vllm_metrics(page: MetricsPage, model: str, engine: int, board: Mapping[str, int]) -> None:
    """engine is the number of the backend among those of the model."""
    page.labels = f'engine="{engine}",model_name="{escaped(model)}"'
    for name, kind, help_text, field in _NUMBERS:
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
    for name, help_text, histogram in _HISTOGRAMS:
        page.add_histogram(name, help_text, histogram, _US, board, Board.TOTALS)
