"""Draws a snapshot as text. Names that come from outside are never read as rich's markup."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.commands.top.snapshot import Line, Snapshot, Sort, sorted_lines

MAX_TENANTS = 5
MAX_STEPS = 5
_BAR_WIDTH = 20
HELP = "sort: a age  g generated  r rate  p prompt  t tenant  s state   space pauses   q quits"
CANCEL_HELP = "j k choose   c cancels"


def draw(
    snapshot: Snapshot, sort: Sort, *, num_lines: int, notice: str = "", chosen: str | None = None
) -> RenderableType:
    """Return a frame with at most num_lines requests. chosen is the name of the marked request."""
    parts: list[RenderableType] = [_header(snapshot), _pages(snapshot), *_rates(snapshot)]
    if notice:
        parts.append(Text(notice, style="yellow"))
    if snapshot.tenants:
        parts += [Text(), _tenant_table(snapshot)]
    if snapshot.steps:
        parts += [Text(), _step_table(snapshot)]
    return Group(*parts, Text(), _request_table(snapshot, sort, num_lines, chosen))


def num_lines_that_fit(height: int, snapshot: Snapshot) -> int:
    """Requests for which a terminal of this height has room, at least one."""
    num_others = 11 + min(MAX_TENANTS, len(snapshot.tenants)) + min(MAX_STEPS, len(snapshot.steps)) + 4
    return max(1, height - num_others)


def _header(snapshot: Snapshot) -> Text:
    started = snapshot.started
    if started is None:
        return Text("the backend has not started yet", style="bold")
    text = Text(started.model, style="bold")
    text.append(f"   backend {started.pid}", style="not bold")
    text.append(f"   running {snapshot.num_running}/{started.max_running}   waiting {snapshot.num_waiting}")
    return text


def _pages(snapshot: Snapshot) -> Text:
    started, last = snapshot.started, snapshot.last
    if started is None or not started.num_pages:
        return Text("pages: none; this model has no KV cache")
    if last is None:
        return Text(f"pages: {started.num_pages:,} of {started.page_size} tokens; no step has run yet")
    held, idle = last.pages_held, last.pages_idle
    cells = [round(_BAR_WIDTH * count / started.num_pages) for count in (held, held + idle)]
    bar = "#" * cells[0] + "+" * (cells[1] - cells[0]) + "." * (_BAR_WIDTH - cells[1])
    free = started.num_pages - held - idle
    return Text(f"pages [{bar}] # held {held:,}  + idle {idle:,}  . free {free:,} of {started.num_pages:,}")


def _rates(snapshot: Snapshot) -> list[Text]:
    rates, last = snapshot.rates, snapshot.last
    age_s = 0.0 if last is None else max(0.0, snapshot.now_s - last.ended_s)
    since = f"   last step {age_s:.0f} s ago" if age_s >= 1 else ""
    return [
        Text(
            f"last 10 s: {rates.steps_per_s:,.1f} steps/s, {rates.step_p50_ms:.1f} ms p50, "
            f"{rates.step_p99_ms:.1f} p99   device busy {rates.busy:.0%}"
        ),
        Text(f"           tokens/s {rates.tokens_per_s:,.0f} computed, {rates.decodes_per_s:,.0f} decoded{since}"),
        Text(
            f"           requests/s {rates.arrived_per_s:.1f} came, {rates.ended_per_s:.1f} ended   "
            f"cancelled {rates.num_cancelled}   preempted {rates.num_preempted}"
        ),
    ]


def _table(*columns: str, num_left: int) -> Table:
    """The first columns are aligned to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < num_left else "right", no_wrap=True)
    return table


def _tenant_table(snapshot: Snapshot) -> Table:
    table = _table("TENANT", "RUNNING", "WAITING", "TOKENS HELD", "TOK/S", num_left=1)
    for tenant in snapshot.tenants[:MAX_TENANTS]:
        counts = f"{tenant.num_running}", f"{tenant.num_waiting}", f"{tenant.num_tokens:,}"
        table.add_row(Text(tenant.tenant), *counts, f"{tenant.tokens_per_s:.1f}")
    return table


def _step_table(snapshot: Snapshot) -> Table:
    names = ("STEP", "MS", "WAITED", "TOKENS", "DECODE", "PREFILL", "RESTORED", "LISTENERS", "DROPPED")
    table = _table(*names, num_left=0)
    for step in snapshot.steps[-MAX_STEPS:]:
        counts = step.num_tokens, step.num_decodes, step.num_prefills, step.num_restored, step.num_listeners
        times = f"{1e3 * step.step_s:.1f}", f"{1e3 * step.waited_s:.1f}"
        table.add_row(str(step.step), *times, *map(str, counts), "failed" if step.is_failed else str(step.num_dropped))
    return table


def _request_table(snapshot: Snapshot, sort: Sort, num_lines: int, chosen: str | None) -> RenderableType:
    lines = sorted_lines(snapshot.lines, sort)
    if not lines:
        return Text("no open requests")
    table = _table("REQUEST", "TENANT", "STATE", "AGE", "PROMPT", "CACHED", "DONE", "OF", "TOK/S", num_left=3)
    for line in lines[:num_lines]:
        style = "reverse" if line.name == chosen else "" if line.is_running else "dim"
        table.add_row(*_cells(line), style=style)
    if len(lines) <= num_lines:
        return table
    return Group(table, Text(f"and {len(lines) - num_lines} more, sorted by {sort.value}"))


def _cells(line: Line) -> list[Text]:
    counts = (f"{count:,}" for count in (line.num_prompt, line.num_cached, line.num_generated, line.max_tokens))
    cells = [line.name, line.tenant, line.state, f"{line.age_s:.1f} s", *counts, f"{line.tokens_per_s:.1f}"]
    return [Text(cell) for cell in cells]
