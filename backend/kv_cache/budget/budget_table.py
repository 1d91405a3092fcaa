"""The KV plan as tables, which `--dry-run` prints."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.process.options import format_size


def print_plan(plan: KvPlan | WholePlan, host_kv_bytes: int) -> None:
    Console().print(plan_tables(plan, host_kv_bytes))


def plan_tables(plan: KvPlan | WholePlan, host_kv_bytes: int = 0) -> Group:
    """Two tables: the memory taken and what it holds, on device and host; then the KV dtypes that were tried. Without a
    KV cache only the first."""
    if isinstance(plan, WholePlan):
        return Group(_two_columns(whole_rows(plan)))
    return Group(_two_columns(plan_rows(plan, host_kv_bytes)), _choice_table(plan))


def whole_rows(plan: WholePlan) -> list[tuple[str, str]]:
    """The table of a pass without a KV cache, as (name, value) rows."""
    quantization = [] if plan.quantization == "none" else [("of the weights, linears", plan.quantization)]
    return [
        *_taken_rows(plan),
        *quantization,
        ("KV cache", "none"),
        ("longest input", f"{plan.max_context_tokens:,} tokens"),
        ("inputs of a step", f"{plan.max_rows:,}"),
        ("tokens of a step with several", f"{plan.step_tokens:,}"),
        *((f"values of a vector, {kind}", f"{width:,}") for kind, width in plan.pooled),
    ]


def plan_rows(plan: KvPlan, host_kv_bytes: int = 0) -> list[tuple[str, str]]:
    """The first table, as (name, value) rows."""
    auto = [(name, format_size(num_bytes)) for name, num_bytes in plan.budget.auto_parts]
    budget = "KV budget (auto)" if auto else "KV budget"
    capped = f", the most that --max-running {plan.max_running} can use" if plan.is_capped else ""
    host = [("host memory for pages", f"{format_size(host_kv_bytes)} at most")] if host_kv_bytes else []
    graphs = [("of the workspace, graphs", f"{format_size(plan.graph_bytes)} (estimated)")] if plan.graph_bytes else []
    pictures = [("of both, for pictures", format_size(plan.picture_bytes))] if plan.picture_bytes else []
    size = format_size(plan.state_bytes)
    states = [(f"of the budget, state of {plan.max_running} sequences", size)] if plan.state_bytes else []
    if plan.num_checkpoints:
        name = f"of the budget, {plan.num_checkpoints} checkpoints of states"
        states.append((name, format_size(plan.checkpoint_bytes)))
    held = f"{plan.choice.held_tokens:,} tokens"
    windows = [("of it in pages, because of windows", held)] if plan.groups.has_windows else []
    quantization = [] if plan.quantization == "none" else [("of the weights, linears", plan.quantization)]
    return [
        *(auto or _taken_rows(plan)),
        *quantization,
        *pictures,
        *graphs,
        (budget, format_size(plan.budget.num_bytes)),
        *states,
        ("KV cache", f"{format_size(plan.num_bytes)}{capped}"),
        ("KV dtype", plan.kv_dtype),
        ("bytes per token", f"{plan.bytes_per_token:,}"),
        ("tokens per page", f"{plan.page_size_tokens:,}"),
        ("pages", f"{plan.num_pages:,}"),
        ("tokens", f"{plan.num_tokens:,}"),
        ("longest sequence", f"{plan.max_context_tokens:,} tokens"),
        *windows,
        ("sequences of that length", f"{plan.num_longest_sequences:,}"),
        *host,
    ]


def _taken_rows(plan: KvPlan | WholePlan) -> list[tuple[str, str]]:
    rows = [("weights", plan.weight_bytes), ("workspace", plan.workspace_bytes)]
    return [(name, format_size(num_bytes)) for name, num_bytes in rows if num_bytes]


def _two_columns(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    for row in rows:
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
        sequences = capacity.num_tokens / choice.held_tokens
        table.add_row(capacity.kv_dtype, *(f"{number:,}" for number in numbers), f"{sequences:,.1f}")
    return table
