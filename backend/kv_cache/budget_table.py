"""The KV plan for people: what `--dry-run` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from penstock.shm.process.options import format_size

if TYPE_CHECKING:
    from penstock.backend.kv_cache.budget import KvPlan


def plan_tables(plan: KvPlan, host_kv_bytes: int = 0) -> Group:
    """Two tables: the memory taken and what it holds, on device and host; then the KV dtypes that were tried."""
    return Group(_plan_table(plan, host_kv_bytes), _choice_table(plan))


def plan_rows(plan: KvPlan, host_kv_bytes: int = 0) -> list[tuple[str, str]]:
    """The first table, as (name, value) rows."""
    auto = [(name, format_size(num_bytes)) for name, num_bytes in plan.budget.auto_parts]
    budget = "KV budget (auto)" if auto else "KV budget"
    capped = f", the most that --max-running {plan.max_running} can use" if plan.is_capped else ""
    host = [("host memory for pages", f"{format_size(host_kv_bytes)} at most")] if host_kv_bytes else []
    graphs = [("of the workspace, graphs", f"{format_size(plan.graph_bytes)} (estimated)")] if plan.graph_bytes else []
    quantization = [] if plan.quantization == "none" else [("of the weights, linears", plan.quantization)]
    return [
        *(auto or _taken_rows(plan)),
        *quantization,
        *graphs,
        (budget, format_size(plan.budget.num_bytes)),
        ("KV cache", f"{format_size(plan.num_bytes)}{capped}"),
        ("KV dtype", plan.kv_dtype),
        ("bytes per token", f"{plan.bytes_per_token:,}"),
        ("tokens per page", f"{plan.page_size_tokens:,}"),
        ("pages", f"{plan.num_pages:,}"),
        ("tokens", f"{plan.num_tokens:,}"),
        ("longest sequence", f"{plan.max_context_tokens:,} tokens"),
        ("sequences of that length", f"{plan.num_pages // plan.max_pages_per_sequence:,}"),
        *host,
    ]


def _taken_rows(plan: KvPlan) -> list[tuple[str, str]]:
    rows = [("weights", plan.weight_bytes), ("workspace", plan.workspace_bytes)]
    return [(name, format_size(num_bytes)) for name, num_bytes in rows if num_bytes]


def _plan_table(plan: KvPlan, host_kv_bytes: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    for row in plan_rows(plan, host_kv_bytes):
        table.add_row(*row)
    return table


def _choice_table(plan: KvPlan) -> Table:
    choice = plan.choice
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=f"{choice.reason}.", caption_justify="left")
    columns = ("KV dtype", "bytes per token", "pages", "tokens", f"sequences of {choice.full_context_tokens:,} tokens")
    for column in columns:
        table.add_column(column, justify="right")
    for capacity in choice.tried:
        numbers = (capacity.bytes_per_token, capacity.num_pages, capacity.num_tokens)
        sequences = capacity.num_tokens / choice.full_context_tokens
        table.add_row(capacity.kv_dtype, *(f"{number:,}" for number in numbers), f"{sequences:,.1f}")
    return table
